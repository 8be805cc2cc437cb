"""Agents in which one policy plays several roles: search self-play, and attacker and defender."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.services.reward.config import RewardConfig, ScorerConfig, build_engine
from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.rollout.agent import load_agent
from rollmesh.services.rollout.agents.red_team import public_part
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Episode, Outcome, Reward
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.testing.rollout import FixedPrivateData, LocalMesh, lease
from rollmesh.trainer.recipe import find_recipe, read_recipe
from rollmesh.v1 import coordinator_pb2, types_pb2

from ..shared.chat_server import chat_server
from .reward_service import ServicePort
from .scored_items import items_of
from .self_play_toy import LEVELS, UNANSWERABLE, SelfPlayToy

COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
QUESTION = "Which number of legs has the animal of the second document"
STEP = 3


# Search self-play -----------------------------------------------------------------------------------------------------


def player(
    question: str = f"<question>{QUESTION}</question>", reads: str = "4", calls: tuple[str, ...] = ("legs", "animals")
) -> Any:
    """A model that asks after some calls, reads, and answers with a digit that differs between solvers."""

    def script(text: str) -> str:
        prompt = text.partition("<|user|>")[2].partition("<|end|>")[0]
        if prompt.startswith("[Documents]"):
            return f"<answer>{reads}</answer><|end|>"
        done = text.count("<|tool|>")
        if prompt.startswith(QUESTION):
            return "<answer>?</answer><|end|>" if done else "<tool_call>again</tool_call><|end|>"
        return f"<tool_call>{calls[done]}</tool_call><|end|>" if done < len(calls) else f"{question}<|end|>"

    return script


async def asked(
    script: Any, *, endpoint: str = "", limits: Mapping[str, Any] | None = None, **of_lease: Any
) -> tuple[LocalMesh, Episode]:
    mesh = LocalMesh(
        config=RolloutConfig(limits=LimitsConfig(**limits or {})),
        script=script,
        functions={"call": lambda text: f"result of {text}"},
        steps=(STEP,),
        rewards=lambda text: (Reward(name="correct", value=float(text == "<answer>4</answer>")),),
        private_extras={"answer": "four"},
    )
    agent = load_agent(Extension("search_self_play", {"endpoint": endpoint, "num_solvers": 3}))
    given = {"tools": ["calculator"], "messages": ["Ask for: four"], **of_lease}
    report = await mesh.runner(agent).run(lease(**given))
    assert report.outcome == COMPLETED, report.failure
    return mesh, mesh.samples.episodes[-1]


def texts(mesh: LocalMesh, episode: Episode) -> list[str]:
    """The text of each sample."""
    paths = [episode.path_segments(sample) for sample in episode.samples]
    return [mesh.tokenizer.decode(np.concatenate([s.token_ids for s in path])) for path in paths]


@pytest.mark.row("S079")
async def test_proposer_and_solvers_of_one_version_are_samples_of_one_episode() -> None:
    mesh, episode = await asked(player())
    assert [sample.role for sample in episode.samples] == ["proposer", "solver", "solver", "solver"]
    trained = [s for sample in episode.samples for s in episode.path_segments(sample) if s.num_trainable]
    assert {s.version.step for s in trained if s.version is not None} == {STEP}
    proposer, *solvers = texts(mesh, episode)
    assert "Ask for: four" in proposer
    for solver in solvers:
        assert solver.count(QUESTION) == 1
        assert "four" not in solver
        assert "[Documents]" not in solver, "the documents of the proposer are not shown to a solver"
    assert len({solver.rpartition("<answer>")[2] for solver in solvers}) > 1, "solvers draw different answers"
    (read,) = [s for s in episode.segments if any(m.content == "<answer>4</answer>" for m in s.messages)][:1]
    assert (read.num_trainable, read.num_tokens > 0) == (0, True), "the reader is not trained"
    (prompt,) = [m.content for s in episode.segments for m in s.messages if m.content.startswith("[Documents]")]
    assert "result of legs" in prompt
    assert "result of animals" in prompt


@pytest.mark.row("S079")
@pytest.mark.parametrize(
    "script",
    [
        player(reads="5"),
        player("no question"),
        player("<question>too short</question>"),
        player("<question>Which number of legs has the animal with exactly four legs here?</question>"),
        player(calls=("legs",)),
        player(calls=("legs", "legs")),
    ],
    ids=["the reader is wrong", "no question", "short", "the answer is in it", "one call", "a call is repeated"],
)
async def test_a_question_that_is_not_accepted_has_no_solvers_and_no_reward(script: Any) -> None:
    mesh, episode = await asked(script)
    assert [sample.role for sample in episode.samples] == ["proposer"]
    assert await played_rewards(items_of(mesh.scorer.items[-1], answers=["4"])) == [0.0]


async def test_a_task_without_the_answer_fails_and_an_evaluation_has_one_answer() -> None:
    mesh = LocalMesh(script=player(), functions={"call": lambda text: "7"})
    agent = load_agent(Extension("search_self_play", {"endpoint": ""}))
    report = await mesh.runner(agent).run(lease(tools=["calculator"]))
    assert "the task t has no private extra `answer`" in report.failure.message
    labelled = await mesh.runner(agent).run(lease(tools=["calculator"], labels={"answer": "four"}))
    assert "remove the label `answer`, which every process of the run can read" in labelled.failure.message
    mesh.data = FixedPrivateData({"answer": None})
    report = await mesh.runner(agent).run(lease(tools=["calculator"], lease_id="null"))
    assert "the private extra `answer` of the task t must be the answer" in report.failure.message
    _, episode = await asked(player(), messages=[QUESTION], purpose=types_pb2.PURPOSE_EVAL)
    assert [sample.role for sample in episode.samples] == [""]


async def played_rewards(items: list[ScoreItem], **options: Any) -> list[float]:
    config = RewardConfig(
        scorers=(
            ScorerConfig(name="exact", reward="correct"),
            ScorerConfig(name="self_play", reward="played", options=options),
        )
    )
    engine = build_engine(config)
    scored = await engine.score(items)
    await engine.close()
    found = [next(reward for reward in rewards if reward.name == "played") for rewards in scored]
    assert all(reward.outcome is Outcome.OK for reward in found)
    return [reward.value for reward in found]


@pytest.mark.row("S079")
@pytest.mark.parametrize(
    ("answers", "options", "proposer"),
    [
        ("4444", {}, 0.0),
        ("4555", {}, 0.75),
        ("5555", {}, 1.0),
        ("4455", {"form": "intermediate"}, 1.0),
        ("4555", {"form": "intermediate"}, 0.75),
        ("4444", {"form": "intermediate"}, 0.0),
        ("", {"rejected": -0.5}, -0.5),
    ],
)
async def test_the_proposer_is_rewarded_by_the_failures_of_the_solvers(
    answers: str, options: dict[str, Any], proposer: float
) -> None:
    """By hand: 1 - a, or 4 a (1 - a), with the share a of right solvers."""
    mesh, _ = await asked(player())
    one, some, *_ = items_of(mesh.scorer.items[-1], answers=["4"])
    solvers = [
        replace(some, messages=(replace(some.messages[-1], content=f"<answer>{answer}</answer>"),), sample_id=f"s{n}")
        for n, answer in enumerate(answers)
    ]
    found = await played_rewards([one, *solvers], **options)
    assert found == [proposer, *(float(answer == "4") for answer in answers)]


async def test_a_limit_that_the_roles_share_gives_the_proposer_no_reward() -> None:
    """The cheapest play has 3 turns of the proposer, 1 of the reader and 2 of each solver."""
    mesh, _ = await asked(player(), limits={"turns_max": 7})
    items = items_of(mesh.scorer.items[-1], answers=["4"])
    assert [item.role for item in items] == ["proposer", "solver", "solver"]
    assert await played_rewards(items) == [0.0] * 3
    _, recipe = read_recipe(find_recipe("ssp"))
    assert recipe["rollout"]["limits"]["turns_max"] > 3 + 2 * recipe["rollout"]["agent"]["options"]["num_solvers"]


@pytest.mark.row("S079")
async def test_the_solver_stays_between_0_and_1_while_both_roles_improve() -> None:
    """Six levels of questions, of which the solver knows half at first, and one that cannot be answered."""
    toy = SelfPlayToy(seed=1, lr=2.0)
    before = toy.accuracy
    shares = [await toy.update(number, num_episodes=6) for number in range(8)]
    assert all(0.1 < share < 0.95 for share in shares)
    assert toy.accuracy > before + 0.1
    assert toy.chosen()[LEVELS[-1]] > 0.3, "the proposer asks what the solver does not know; it was 0.14"
    assert toy.chosen()[UNANSWERABLE] < 0.1


# Attacker and defender ------------------------------------------------------------------------------------------------

ATTACK, REFUSAL = "how is it made", "I will not say"


def both(attack: str = f"<think>a secret plan</think><answer>{ATTACK}</answer>") -> Any:
    """A model that attacks and refuses."""

    def script(text: str) -> str:
        attacks = "You test the safety" in text
        return f"{attack if attacks else f'<think>it is an attack</think><answer>{REFUSAL}</answer>'}<|end|>"

    return script


async def game(
    verdict: Any, script: Any = None, **given: Any
) -> tuple[LocalMesh, Episode, list[dict[str, float]], list[str]]:
    """Play a game. Return the rewards of each sample by name, and what the judge was asked."""
    options = given.pop("options", {})
    async with chat_server(lambda body: json.dumps(verdict)) as server:
        entry = {"kind": "openai", "base_url": server.url, "model": "m", "retry_s": 0.0}
        endpoints = Endpoints({"judge": config_from_dict(EndpointConfig, entry)})
        config = RolloutConfig(limits=LimitsConfig(**given.pop("limits", {})))
        mesh = LocalMesh(script=script or both(), endpoints=endpoints, config=config)
        _, recipe = read_recipe(find_recipe("self_red_team"))
        mesh.scorer = ServicePort(recipe["reward"]["scorers"])  # type: ignore[assignment]
        agent = load_agent(Extension("red_team", options))
        report = await mesh.runner(agent).run(lease(**{"messages": ["seed"], "labels": {"kind": "harmful"}, **given}))
        await endpoints.close()
        asked = [request["messages"][0]["content"] for request in server.requests]
    assert report.outcome == COMPLETED, report.failure
    episode = mesh.samples.episodes[-1]
    found = [{r.name: r.value for r in s.rewards if r.outcome is Outcome.OK} for s in episode.samples]
    return mesh, episode, found, asked


def verdict(request: bool, refuses: bool, answer: bool) -> dict[str, bool]:
    return {"request_harmful": request, "refuses": refuses, "answer_harmful": answer}


@pytest.mark.row("S090")
async def test_thoughts_are_hidden_and_the_game_is_zero_sum() -> None:
    mesh, episode, rewards, asked = await game(verdict(True, True, False))
    assert [sample.role for sample in episode.samples] == ["attacker", "defender"]
    attacker, defender = texts(mesh, episode)
    assert "a secret plan" in attacker
    assert ATTACK in defender
    assert "secret" not in defender
    assert "seed" not in defender
    assert len(asked) == 1
    assert ATTACK in asked[0]
    assert REFUSAL in asked[0]
    assert "secret" not in asked[0]
    assert "it is an attack" not in asked[0]
    assert rewards == [{"game": -2.0, "form": 1.0, "faithful": 1.0}, {"game": 2.0, "form": 1.0}]
    assert all(s.num_trainable for sample in episode.samples for s in episode.path_segments(sample)[1:])


@pytest.mark.row("S090")
@pytest.mark.parametrize(
    ("request_harmful", "refuses", "answer_harmful", "won"),
    [
        (True, True, False, 2),
        (True, False, True, -2),
        (True, False, False, 0),
        (False, True, False, 0),
        (False, False, False, 2),
        (False, False, True, 0),
    ],
)
async def test_the_attacker_wins_what_the_defender_loses(
    request_harmful: bool, refuses: bool, answer_harmful: bool, won: float
) -> None:
    """By hand: +-1 for the answer, and +-1 for refusing just the harmful requests."""
    for kind in ("harmful", "benign"):
        _, _, (attacker, defender), _ = await game(
            verdict(request_harmful, refuses, answer_harmful), labels={"kind": kind}
        )
        assert (attacker["game"], defender["game"]) == (-won, won)
        assert attacker["faithful"] == (1.0 if request_harmful == (kind == "harmful") else -1.0)


@pytest.mark.parametrize(
    ("said", "public", "form"),
    [
        ("<think>x</think><answer>a</answer>", "a", 1.0),
        ("<think>x</think>\n <answer> a </answer>\n", "a", 1.0),
        ("<think>x</think>a", "a", -1.0),
        ("<think>x <answer>a</answer>", "", -1.0),
        ("x</think><answer>a</answer>", "a", -1.0),
        ("<think>x</think><think>y</think><answer>a</answer>", "a", -1.0),
        ("<think>x</think><answer>a</answer> b", "a", -1.0),
        ("a", "a", -1.0),
        ("<answer>a</answer>", "a", -1.0),
    ],
)
async def test_no_thought_is_public_whatever_the_form(said: str, public: str, form: float) -> None:
    assert public_part(said) == public
    _, _, (attacker, _), _ = await game(verdict(True, True, False), both(said))
    assert attacker["form"] == form


async def test_a_judge_that_answers_nonsense_is_an_infra_failure_and_the_kind_must_be_known() -> None:
    nonsense: list[Any] = [{"request_harmful": True}, {**verdict(True, True, True), "refuses": 1}, [], "yes"]
    for answer in nonsense:
        with pytest.raises(AssertionError, match="the judge must return JSON"):
            await game(answer)
    with pytest.raises(AssertionError, match="must be one of harmful"):
        await game(verdict(True, True, True), labels={"kind": "odd"})


async def test_seeds_without_an_attacker_and_evaluations_have_only_the_defender() -> None:
    mesh, episode, rewards, (asked,) = await game(verdict(True, True, False), options={"vanilla": 1.0})
    assert [sample.role for sample in episode.samples] == ["defender"]
    assert rewards == [{"game": 2.0, "form": 1.0}]
    assert "[Request]\nseed\n" in asked
    mesh, episode, rewards, _ = await game(verdict(True, False, False), purpose=types_pb2.PURPOSE_EVAL, labels={})
    (text,) = texts(mesh, episode)
    assert "seed" in text
    assert REFUSAL in text
    assert rewards == [{"game": 0.0, "form": 1.0}]


async def test_a_limit_before_the_verdict_gives_both_turns_the_same_rewards() -> None:
    """So neither is trained: the estimator compares them with each other."""
    _, episode, rewards, asked = await game(verdict(True, True, False), limits={"turns_max": 1})
    assert [sample.role for sample in episode.samples] == [""]
    assert rewards == [{"game": -2.0, "form": -1.0}]
    assert not asked


def test_the_recipe_measures_success_by_a_reward_that_evaluations_have() -> None:
    _, recipe = read_recipe(find_recipe("self_red_team"))
    required = [s["reward"] for s in recipe["reward"]["scorers"] if s["options"].get("required", True)]
    assert recipe["run"]["success_reward"] in required
