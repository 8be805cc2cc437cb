"""The maze family: its rules and rewards by hand, and the credit of the turns of a game."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.demo.families.maze import (
    LEVEL_MAX,
    SIDE,
    Maze,
    MazeAgent,
    MazeOptions,
    MazeSource,
    MazeSourceOptions,
    make_maze,
)
from rollmesh.mesh.config import MeshConfig
from rollmesh.services.data.task import PoolTask
from rollmesh.services.rollout.agent import Task, Turn, load_agent
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.codec.trajectory import decode_summary
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Episode, FinishReason, GroupContext, MemberOutcome
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.estimators.turns import TurnEstimator

from ..rollout.reward_service import ServicePort, environment

MOVES = ("north", "east", "south", "west")
Policy = dict[tuple[str, str], dict[str, float]]
"""Logits of the moves by what the model has read last and its last move."""
CORRIDOR = "1110000000000000-1-3"
"""Four cells from west to east; the start is the second, the goal the fourth."""
SCORERS = [environment("solved"), environment("step", min=-4, max=0, per="turn", at_limit=-4)]


async def game(
    *said: str, key: str = CORRIDOR, episode: str = "l1", moves_max: int = 12, config: RolloutConfig | None = None
) -> tuple[Episode, MemberOutcome]:
    """Play a game in which the model says these texts in turn."""
    mesh = LocalMesh(
        script=lambda text: f"{said[text.count('<|assistant|>') - 1]}<|end|>", config=config or RolloutConfig()
    )
    mesh.scorer = ServicePort(SCORERS)  # type: ignore[assignment]
    message = lease([MazeSource(options=MazeSourceOptions()).prompt(key)], lease_id=episode)
    message.task.task_id = f"maze-{key}"
    report = await mesh.runner(load_agent(Extension("maze", {"moves_max": moves_max}))).run(message)
    assert report.HasField("payload"), report.failure
    (meta,) = report.samples
    (played,) = mesh.samples.episodes
    summary = decode_summary(meta.summary)
    rewards = played.samples[0].rewards
    return played, MemberOutcome(
        sample_id=meta.sample_id, rewards=rewards, end="ready", episode=played.key.episode, summary=summary
    )


def rewards(member: MemberOutcome) -> tuple[float, list[float]]:
    """Return `solved`, and `step` by turn."""
    (solved,) = [reward.value for reward in member.rewards if reward.name == "solved"]
    return solved, [reward.value for reward in member.rewards if reward.name == "step"]


# Rules ----------------------------------------------------------------------------------------------------------------


def test_the_exits_of_a_cell_are_open_from_both_sides() -> None:
    maze = Maze.parse("2000000000000000-0-4")
    assert (maze.exits(0), maze.exits(4), maze.exits(1)) == ({"south": 4}, {"north": 0}, {})
    border = Maze.parse(f"{'3' * SIDE * SIDE}-0-15")
    assert border.exits(15) == {"north": 11, "west": 14}
    assert border.exits(3) == {"south": 7, "west": 2}


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 100_000), st.integers(1, LEVEL_MAX))
def test_a_maze_of_a_level_has_a_shortest_path_of_that_length_and_all_cells(seed: int, level: int) -> None:
    maze = make_maze(random.Random(seed), level)
    assert Maze.parse(maze.key) == maze
    assert len(maze.path()) == level
    cells = [maze.start]
    for cell in cells:
        cells += [other for other in maze.exits(cell).values() if other not in cells]
    assert len(cells) == SIDE * SIDE
    assert sum(len(maze.exits(cell)) for cell in cells) == 2 * (SIDE * SIDE - 1), "a tree"
    cell = maze.start
    for move, view in MazeSource(options=MazeSourceOptions()).demonstration(maze.key).calls:
        cell = maze.exits(cell)[move]
        assert view == maze.view(cell)
    assert cell == maze.goal


@pytest.mark.parametrize(
    "key", ["", "1110000000000000-1-16", "1110000000000000-16-1", "4110000000000000-1-3", "11-0-1"]
)
def test_a_text_that_is_not_a_maze_is_rejected(key: str) -> None:
    with pytest.raises(ValueError, match="must be written as 16 digits of 0 to 3, -START and -GOAL, got "):
        Maze.parse(key)


def test_a_goal_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(ValueError, match="the goal of the maze '1000000000000000-0-9' cannot be reached"):
        Maze.parse("1000000000000000-0-9").path()


def test_a_task_has_the_maze_in_its_id_the_first_cell_in_its_prompt_and_no_key() -> None:
    source = MazeSource(options=MazeSourceOptions(num_train=40, num_validation=10, num_test=10))
    tasks = list(source.tasks())
    assert len({task.task_id for task in tasks}) == 60
    for task in tasks:
        maze = Maze.parse(task.task_id.removeprefix("maze-"))
        assert task.messages[0].content.endswith(f"\n{maze.view(maze.start)}")
        assert maze.passages not in task.messages[0].content
        assert (task.oracle_ref, dict(task.labels)) == ("", {"level": str(len(maze.path()))})


async def test_the_model_sees_one_cell_at_a_time() -> None:
    played, _ = await game("west", "east", "north", "east", "go east")
    seen = [message.content for segment in played.segments for message in segment.messages if message.role == "tool"]
    assert seen == ["open: east", "open: east west", "open: east west", "open: east west", "goal"]


@pytest.mark.parametrize(
    ("said", "solved", "steps"),
    [
        (["east", "east"], 1, [-1, 0]),
        (["west", "east", "east", "east"], 1, [-1, -1, -1, 0]),
        (["I turn from west to east", "north", "move east\n"], 1, [-1, -1, 0]),
        (["eastern", "east", "?", "east"], 1, [-4, -1, -4, 0]),
        (["north"] * 4, 0, [-1] * 4),
    ],
)
async def test_the_rewards_of_a_game(said: Sequence[str], solved: float, steps: Sequence[float]) -> None:
    _, member = await game(*said, moves_max=4)
    assert rewards(member) == (solved, steps)


async def test_a_limit_ends_a_game_that_is_not_solved() -> None:
    config = RolloutConfig(limits=LimitsConfig(turns_max=3))
    played, member = await game("north", "north", "north", "north", config=config)
    assert rewards(member) == (0.0, [-1.0] * 3)
    evidence = {reward.name: reward.evidence for reward in played.samples[0].rewards}
    assert evidence == {"solved": "not at the goal after 3 moves", "step": "north"}
    _, member = await game("north", "n" * 20, config=RolloutConfig(limits=LimitsConfig(tokens_max=10)))
    assert rewards(member) == (0.0, [-1.0, -4.0]), "the text of the second turn is cut"


# Credit ---------------------------------------------------------------------------------------------------------------


@pytest.mark.row("S132")
async def test_credit_of_the_turns_of_a_game_is_assigned_without_a_gpu() -> None:
    """Two games of the recipe from the same cell. The second begins with a step away from the goal.

    With weights 1 and 0.1 the rewards of the turns are -0.1, 1 and -0.1, -0.1, -0.1, 1, so the discounted returns are
    0.85, 1 and 0.572, 0.7075, 0.85, 1. Turns with equal observations: the first ones, with the prompt; and the turns
    that see `open: east west`, whose returns are 1, 0.85, 1. Both games have the advantage 1 and -1 of their sum.
    """
    recipe = config_from_dict(MeshConfig, {"recipe": "lmrl_gym"})
    assert recipe.rollout.agent.name == recipe.data.source.name == "maze"
    declared = [(scorer.name, scorer.reward, scorer.options) for scorer in recipe.reward.scorers]
    assert declared == [(one["name"], one["reward"], one["options"]) for one in SCORERS]
    members = [(await game(*said, episode=said[0]))[1] for said in (["east"] * 2, ["west", "east", "east", "east"])]
    group = GroupContext(group="g", task="t", members=tuple(members))

    by_turn = make_estimator(recipe.learner.estimator, recipe.reward.weights)
    assert isinstance(by_turn, TurnEstimator)
    direct, detour = (by_turn.of_turns(group)[member.sample_id] for member in members)
    low, high = -np.sqrt(2), np.sqrt(0.5)
    assert direct == pytest.approx([1 + 1, 1 + high], abs=1e-4)
    assert detour == pytest.approx([-1 - 1, -1, -1 + low, -1 + high], abs=1e-4)

    whole = make_estimator("grpo", {"solved": 1.0}).of_group(group)
    assert list(whole.values()) == [0.0, 0.0], "the reward of the whole game does not tell them apart"


# Relaxed tasks --------------------------------------------------------------------------------------------------------


def relaxed(level: int, num_mazes: int) -> list[PoolTask]:
    options = MazeSourceOptions(
        level_min=level, level_max=level, num_train=num_mazes, num_validation=2, num_test=0, prefilled_max=LEVEL_MAX
    )
    return list(MazeSource(options=options).tasks())


async def test_a_relaxed_task_begins_with_moves_and_the_game_goes_on_behind_them() -> None:
    tasks = relaxed(3, 2)
    assert [dict(task.labels) for task in tasks[:4]] == [
        {"level": "3", "remaining": remaining} for remaining in ("3", "2", "1", "3")
    ]
    assert [dict(task.labels) for task in tasks[6:]] == [{"level": "3"}] * 2, "held-out tasks are whole"
    last = tasks[2]
    assert last.task_id == f"{tasks[0].task_id}-prefilled-2"
    maze = Maze.parse(tasks[0].task_id.removeprefix("maze-"))
    path = maze.path()
    first = maze.exits(maze.start)[path[0]]
    second = maze.exits(first)[path[1]]
    assert [(message.role, message.content) for message in last.messages] == [
        ("user", tasks[0].messages[0].content),
        ("assistant", path[0]),
        ("tool", maze.view(first)),
        ("assistant", path[1]),
        ("tool", maze.view(second)),
    ]
    walk = Walk(last, {}, random.Random(0), forced=path[2])
    await walk.play(moves_max=1)
    assert walk.rewards == {"step": 0.0, "solved": 1.0}


class Walk:
    """The environment of an episode whose policy draws a move by weights that depend on the view and the last move."""

    def __init__(self, task: PoolTask, weights: Policy, rng: random.Random, forced: str = "") -> None:
        self._task, self._weights, self._rng, self._forced = task, weights, rng, forced
        said = [message.content for message in task.messages if message.role == "assistant"]
        self._seen = (task.messages[-1].content.splitlines()[-1], said[-1] if said else "")
        self.moves: list[tuple[tuple[str, str], str]] = []
        self.rewards: dict[str, float] = {}

    def probs(self, seen: tuple[str, str]) -> dict[str, float]:
        logits = self._weights.setdefault(seen, dict.fromkeys(MOVES, 0.0))
        total = sum(map(math.exp, logits.values()))
        return {move: math.exp(logit) / total for move, logit in logits.items()}

    async def generate(self) -> Turn:
        probs = self.probs(self._seen)
        move = self._forced or self._rng.choices(list(probs), list(probs.values()))[0]
        self.moves.append((self._seen, move))
        empty = np.zeros(0, np.int32)
        return Turn(text=move, finish=FinishReason.STOP, token_ids=empty, logprobs=empty.astype(np.float32))

    def observe(self, text: str) -> None:
        self._seen = (text, self.moves[-1][1])

    def reward(self, name: str, value: float, **_: Any) -> None:
        self.rewards[name] = float(value)

    async def play(self, moves_max: int) -> float:
        """Play the game, and return whether it is solved."""
        task = Task(task_id=self._task.task_id, messages=self._task.messages)
        await MazeAgent(options=MazeOptions(moves_max=moves_max)).run(task, self)  # type: ignore[arg-type]
        return self.rewards["solved"]

    def learn(self, advantage: float) -> None:
        """Take a step of the policy gradient."""
        for seen, move in self.moves:
            probs = self.probs(seen)
            for other in MOVES:
                self._weights[seen][other] += advantage * ((other == move) - probs[other])


@pytest.mark.row("S178")
async def test_the_success_of_whole_games_rises_along_a_curriculum_of_relaxed_ones() -> None:
    """Games of 4 moves that allow no detour. Without relaxed tasks, the policy rarely gets a reward to learn from."""
    tasks = relaxed(4, 60)[:-2]
    by_remaining = {n: [task for task in tasks if task.labels["remaining"] == str(n)] for n in range(1, 5)}
    assert {n: len(found) for n, found in by_remaining.items()} == dict.fromkeys(range(1, 5), 60)

    async def success(weights: Policy) -> float:
        rng = random.Random(1)
        return sum([await Walk(task, weights, rng).play(4) for task in by_remaining[4]]) / 60

    async def trained(stages: Sequence[int]) -> list[float]:
        weights: Policy = {}
        rng, rates = random.Random(0), [await success(weights)]
        for remaining in stages:
            for _ in range(5):
                for task in by_remaining[remaining]:
                    walk = Walk(task, weights, rng)
                    walk.learn(0.5 * await walk.play(remaining))
            rates.append(await success(weights))
        return rates

    curriculum, whole = await trained([1, 2, 3, 4]), await trained([4, 4, 4, 4])
    assert curriculum[0] < 0.05
    assert curriculum[-1] > curriculum[2] > curriculum[0]
    assert curriculum[-1] > whole[-1] + 0.1
