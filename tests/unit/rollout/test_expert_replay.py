"""The agent that replays a stored expert trajectory as an environment, with patches after departures."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.rollout.agents.expert_replay import ExpertReplayAgent, ExpertReplayOptions, ExpertStep
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Episode, Role, Source
from rollmesh.shared.errors import ConfigError
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.v1 import coordinator_pb2, types_pb2

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
EXPERT = [
    {"action": "<act>open mail</act>", "thought": "First ", "observation": "inbox"},
    {"action": "<act>tap 3</act>", "observation": "letter"},
    {"action": "<act>reply yes</act>", "observation": "unused"},
]
RIGHT = ["<act>open  mail</act>", "so <act>tap 3</act>", "<act>reply yes</act>"]


def says(*turns: str, seen: tuple[str, ...] = ("inbox", "letter")) -> Any:
    """Return a model whose turn depends on the last observation of the expert that it has seen."""

    def script(text: str) -> str:
        number = sum(f"<|tool|>{one}" in text for one in seen)
        return f"{turns[number]}<|end|>"

    return script


async def played(
    *turns: str, trajectory: object = EXPERT, config: RolloutConfig | None = None, **given: Any
) -> tuple[LocalMesh, Any]:
    options = given.pop("options", {})
    mesh = LocalMesh(script=says(*turns), private_extras={"trajectory": trajectory}, config=config or RolloutConfig())
    report = await mesh.runner(load_agent(Extension("expert_replay", options))).run(lease(**given))
    return mesh, report


def rewards(mesh: LocalMesh) -> dict[str, list[Any]]:
    """Return the values of the environment's rewards by name, in order."""
    found: dict[str, list[Any]] = {}
    for reward in mesh.scorer.items[-1].environment_rewards:
        found.setdefault(reward.name, []).append(pytest.approx(reward.value))
    return found


def paths(mesh: LocalMesh) -> list[list[str]]:
    """Return the turns of each sample; those of the expert begin with `given:`."""
    episode: Episode = mesh.samples.episodes[-1]
    return [
        [
            ("given:" if s.source is Source.DATASET else "")
            + mesh.tokenizer.decode(s.token_ids).removesuffix("<|end|>")
            for s in episode.path_segments(sample)
            if s.role is Role.ACTION
        ]
        for sample in episode.samples
    ]


async def test_a_model_that_acts_as_the_expert_sees_what_the_expert_saw_and_keeps_its_own_turns() -> None:
    mesh, report = await played(*RIGHT)
    assert report.outcome == COMPLETED, report.failure
    assert paths(mesh) == [RIGHT]
    assert rewards(mesh) == {"step": [1.0] * 3, "progress": [1.0], "solved": [1.0]}
    last = mesh.tokenizer.decode(mesh.generator.asked[-1][0])
    assert last.endswith(
        "<|assistant|><act>open  mail</act><|end|><|tool|>inbox<|end|><|assistant|>so <act>tap 3</act><|end|>"
        "<|tool|>letter<|end|><|assistant|>"
    )
    assert len(mesh.generator.asked) == 3, "nothing follows the last step"


@pytest.mark.row("S123")
async def test_a_patch_restores_the_turn_of_the_expert_and_is_flagged() -> None:
    mesh, report = await played("<act>open door</act>", *RIGHT[1:])
    assert report.outcome == COMPLETED, report.failure
    assert paths(mesh) == [["<act>open door</act>"], ["given:First <act>open mail</act>", *RIGHT[1:]]]
    patched = [s for s in mesh.samples.episodes[-1].segments if s.source is Source.DATASET]
    assert [(s.role, s.num_trainable, s.logprobs) for s in patched] == [(Role.ACTION, 0, None)]
    assert rewards(mesh) == {"step": [0.5, 1.0, 1.0], "progress": [0.0], "solved": [0.0]}
    second = mesh.tokenizer.decode(mesh.generator.asked[1][0])
    assert "open door" not in second, "the dialogue goes back before the turn that departed"
    assert second.endswith("<|assistant|>First <act>open mail</act><|end|><|tool|>inbox<|end|><|assistant|>")
    without, _ = await played("<act>open door</act>", *RIGHT[1:], options={"thoughts": False})
    assert paths(without)[1][0] == "given:<act>open mail</act>"


@pytest.mark.row("S123")
@pytest.mark.parametrize(
    ("patches", "turns", "steps"),
    [(0, 1, [0.0]), (1, 2, [0.0, 0.1]), (2, 3, [0.0, 0.1, 1.0]), (-1, 3, [0.0, 0.1, 1.0])],
)
async def test_the_budget_of_patches_bounds_the_departures(patches: int, turns: int, steps: list[float]) -> None:
    mesh, report = await played("nothing", "<act>wait</act>", RIGHT[2], options={"patches": patches})
    assert report.outcome == COMPLETED, report.failure
    assert rewards(mesh)["step"] == steps
    assert len(mesh.generator.asked) == turns
    given = sum(turn.startswith("given:") for path in paths(mesh)[-1:] for turn in path)
    assert given == min(2, patches if patches >= 0 else 2)


async def test_an_evaluation_reads_a_public_trajectory_and_ends_at_the_first_departure() -> None:
    mesh, report = await played(
        RIGHT[0], "<act>tap 4</act>", RIGHT[2], purpose=types_pb2.PURPOSE_EVAL, extras={"trajectory": EXPERT}
    )
    assert report.outcome == COMPLETED, report.failure
    assert rewards(mesh) == {"step": [1.0, 0.5], "progress": [1 / 3], "solved": [0.0]}
    assert mesh.data.asked == []
    _, failed = await played(*RIGHT, purpose=types_pb2.PURPOSE_EVAL)
    assert "an evaluation has no private extras, because its result must not depend on" in failed.failure.message


async def test_a_limit_of_turns_ends_the_episode_with_its_rewards() -> None:
    mesh, report = await played(*RIGHT, config=RolloutConfig(limits=LimitsConfig(turns_max=2)))
    assert report.outcome == COMPLETED, report.failure
    assert rewards(mesh) == {"step": [1.0, 1.0], "progress": [2 / 3], "solved": [0.0]}


@pytest.mark.parametrize("trajectory", ["text", [], [{"thought": "x"}], [{"action": 3}], None])
async def test_a_malformed_trajectory_fails_the_attempt_and_says_what_it_must_be(trajectory: object) -> None:
    _, report = await played(*RIGHT, trajectory=trajectory)
    assert "the extra `trajectory` of the task t must be a list of steps with `action`" in report.failure.message


def test_actions_are_compared_up_to_spaces_and_by_their_kind() -> None:
    agent = ExpertReplayAgent(options=ExpertReplayOptions())
    expert = ExpertStep(action="<act>tap 3</act>")
    for said, reward in (
        ("I think <act>\ntap   3 </act>", 1.0),
        ("<act>wait</act> no, <act>tap 3</act>", 1.0),
        ("<act>tap 4</act>", 0.5),
        ("<act>wait</act>", 0.1),
        ("tap 3", 0.0),
    ):
        assert agent.grade(said, expert) == reward, said
    assert agent.grade(f"<act>tap 3</act>{'x' * 5000}", expert) == 0.0, "only the end of a turn is searched"
    plain = ExpertReplayAgent(options=ExpertReplayOptions(pattern="do (?P<action>.*)"))
    assert plain.grade("do x", ExpertStep(action="do y")) == 0.1, "without kinds"


def test_the_pattern_needs_the_action() -> None:
    for pattern, message in (
        ("(", "`pattern` must be a regular expression, got"),
        ("x", "must have the group `action`"),
    ):
        with pytest.raises(ConfigError, match=message.replace("(", "[(]")):
            load_agent(Extension("expert_replay", {"pattern": pattern}))
