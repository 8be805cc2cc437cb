"""Recipes that ask other models: numbers by hand, and real answers of a server of the OpenAI protocol."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rollmesh.app.checks.config_checks import find_mistakes
from rollmesh.app.config import load_train_config
from rollmesh.services.reward.config import RewardConfig, ScorerConfig, build_engine
from rollmesh.services.reward.item import TEXT_CHARS_MAX, WHOLE_CHARS_MAX, JudgedSegment, ScoreItem, TaskView
from rollmesh.services.reward.scorer import SCORERS, Scorer
from rollmesh.services.rollout.agent import load_agent
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    Episode,
    FinishReason,
    MemberOutcome,
    Outcome,
    Reward,
    Role,
    SampleSummary,
    Source,
)
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.errors import ConfigError
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.trainer.estimators.base import make_estimator
from rollmesh.trainer.losses.base import LOSSES, LossInputs
from rollmesh.trainer.other_prompt import OtherPromptLogprob, OtherPromptOptions
from rollmesh.v1 import types_pb2

from ..shared.chat_server import ChatServer, chat_server
from ..trainer.builders import action, group, member, prompt, training_sample
from . import builders

FOLDER = Path(__file__).parents[3] / "examples" / "endpoint_methods"


def item(*said: str) -> ScoreItem:
    """An item whose task has a text."""
    made = builders.item(*said)
    return replace(made, task=TaskView(task_id="t", messages=made.messages[:1]))


def table(server: ChatServer, *names: str) -> Endpoints:
    entry = {"kind": "openai", "base_url": server.url, "model": "m", "retry_s": 0.0}
    return Endpoints({name: config_from_dict(EndpointConfig, {**entry, "model": name}) for name in names})


async def scored(
    server: ChatServer, scorer: ScorerConfig, *items: ScoreItem, names: tuple[str, ...]
) -> list[dict[str, Reward]]:
    """Score with the reward service's engine; return name -> reward per item."""
    endpoints = table(server, *names)
    config = RewardConfig(scorers=(scorer,), weights={scorer.reward: 1.0})
    engine = build_engine(config, FOLDER, endpoints=endpoints)
    found = await engine.score(items)
    await engine.close()
    await endpoints.close()
    return [{reward.name: reward for reward in rewards} for rewards in found]


# FAPO -----------------------------------------------------------------------------------------------------------------

FLAWED = ScorerConfig(name="flawed_positives", reward="fapo")


@pytest.mark.row("S100", missing="The training of the judge, which stages bring.")
async def test_flawed_positives_are_worth_less_than_clean_ones() -> None:
    def judge(body: dict[str, Any]) -> str:
        asked.append(body["messages"][0]["content"])
        return json.dumps({"first_error": 1 if "6+7" in asked[-1] else -1})

    asked: list[str] = []
    clean = item("6*7 is 42", "<answer>42</answer>")
    flawed = item("think", "6+7 is 42", "<answer>42</answer>")
    wrong = item("6*7 is 41", "<answer>41</answer>")
    async with chat_server(judge) as server:
        found = await scored(server, FLAWED, clean, flawed, wrong, names=("judge",))
    assert [rewards["fapo"].value for rewards in found] == [1.0, 0.0, -1.0]
    assert [(r["flawed"].value, r["flawed"].outcome) for r in found] == [
        (0.0, Outcome.OK),
        (1.0, Outcome.OK),
        (0.0, Outcome.NOT_APPLICABLE),
    ]
    assert len(asked) == 2, "wrong answers are not judged"
    assert any("[0] think\n[1] 6+7 is 42\n[2] <answer>42</answer>" in question for question in asked)


@pytest.mark.parametrize("reply", ["7", "-2", "0.9", "true", '"-1"', "null", "[0]"])
async def test_a_judge_that_returns_no_step_is_an_infra_failure(reply: str) -> None:
    async with chat_server(lambda body: f'{{"first_error": {reply}}}') as server:
        (found,) = await scored(server, FLAWED, item("<answer>42</answer>"), names=("judge",))
    assert found["fapo"].outcome is Outcome.INFRA_FAILURE
    assert 'the judge must return {"first_error": INDEX} with an integer in [-1, 0]' in found["fapo"].evidence


async def test_a_judge_reads_the_whole_text_and_a_longer_one_fails() -> None:
    async with chat_server(lambda body: '{"first_error": -1}') as server:
        steps = "first\n\n" + "x" * TEXT_CHARS_MAX + "\n\n<answer>42</answer>"
        texts = (steps, "x" * WHOLE_CHARS_MAX + "<answer>42</answer>")
        found = await scored(server, FLAWED, *map(item, texts), names=("judge",))
        (question,) = [request["messages"][0]["content"] for request in server.requests]
    assert "\n[0] first\n[1] xxx" in question
    assert found[0]["fapo"].value == 1.0
    assert "lower `rollout.limits.context_tokens_max`" in found[1]["fapo"].evidence


def test_a_reward_that_only_describes_a_sample_needs_weights() -> None:
    with pytest.raises(ConfigError, match=r"`reward.weights` must name .* \{fapo: 1.0\}, because without .* flawed "):
        build_engine(RewardConfig(scorers=(FLAWED,)), FOLDER)


@pytest.mark.row("S100", missing="The training of the judge, which stages bring.")
def test_a_flawed_positive_helps_among_wrong_answers_and_costs_among_clean_ones() -> None:
    # Rewards 0, -1, -1, -1: mean -3/4, so A of the flawed one is +3/4 without scaling. Rewards 0, 1, 1, 1: mean 3/4, A
    # = -3/4.
    estimator = make_estimator(Extension("grpo", {"std": "none"}), {"fapo": 1.0})
    for others, expected in ((-1.0, 0.75), (1.0, -0.75)):
        members = [member("s0", {"fapo": 0.0}), *[member(f"s{n}", {"fapo": others}) for n in (1, 2, 3)]]
        assert estimator.of_group(group("g", *members))["s0"] == pytest.approx(expected)


# Ensembles ------------------------------------------------------------------------------------------------------------


@pytest.mark.row("S101", missing="Best-of-n sampling, and the training of the reward models.")
@pytest.mark.parametrize(
    ("combine", "agree", "disagree"),
    # Scores 0.5, 0.5, 0.5 and 0.2, 0.4, 0.9: mean 0.5 both; the variance of the second is (0.09 + 0.01 + 0.16) / 3 =
    # 0.26 / 3.
    [("mean", 0.5, 0.5), ("worst", 0.5, 0.2), ("uncertainty", 0.5, 0.5 - 0.5 * 0.26 / 3)],
)
async def test_an_ensemble_that_disagrees_rewards_less(combine: str, agree: float, disagree: float) -> None:
    scores = {"rater_0": 0.2, "rater_1": 0.4, "rater_2": 0.9}

    def rate(body: dict[str, Any]) -> str:
        return json.dumps(scores[body["model"]] if "hacked" in body["messages"][0]["content"] else 0.5)

    scorer = ScorerConfig(name="reward_ensemble", reward="ensemble", options={"combine": combine, "penalty": 0.5})
    async with chat_server(rate) as server:
        found = await scored(server, scorer, item("honest"), item("hacked"), names=tuple(scores))
    assert [rewards["ensemble"].value for rewards in found] == [pytest.approx(agree), pytest.approx(disagree)]
    assert [found[1][f"member_{n}"].value for n in range(3)] == list(scores.values())


@pytest.mark.parametrize("reply", ["95", "true", '"1"', "-0.1", "[1]"])
async def test_a_rater_that_returns_something_else_is_an_infra_failure(reply: str) -> None:
    scorer = ScorerConfig(name="reward_ensemble", reward="ensemble", options={"endpoints": ["a", "b"]})
    async with chat_server(lambda body: reply if body["model"] == "b" else "1") as server:
        (found,) = await scored(server, scorer, item("x"), names=("a", "b"))
    assert "`b` must return a number in [0, 1], got " in found["ensemble"].evidence


async def test_the_first_error_of_a_rater_cancels_the_requests_to_the_others() -> None:
    cancelled = []

    class Raters:
        async def ask(self, endpoint: str, *_: Any, **__: Any) -> Any:
            if endpoint == "b":
                raise LookupError("b has no model")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(endpoint)
                raise

    scorer: Scorer = SCORERS.make(Extension("reward_ensemble", {"endpoints": ["a", "b", "c"]}))
    scorer.use_endpoints(Raters())
    with pytest.raises(LookupError, match="b has no model"):
        await scorer.score(item("x"))
    assert sorted(cancelled) == ["a", "c"]


# RLTF -----------------------------------------------------------------------------------------------------------------


def of_turns(sample_id: str, first: float, second: float) -> MemberOutcome:
    """A member with two turns and their rewards."""
    segments = [prompt([20, 21]), action([30, 31], [-1, -1]), prompt([40]), action([50, 51, 52], [-1, -1, -1])]
    made = member(sample_id, {"correct": second}, of=training_sample(sample_id, segments))
    turns = made.summary.turns
    rewards = [
        Reward(name="turn_correct", value=v, segment=t.segment) for v, t in zip((first, second), turns, strict=True)
    ]
    return MemberOutcome(
        sample_id=sample_id, rewards=(*made.rewards, *rewards), end="ready", episode=sample_id, summary=made.summary
    )


@pytest.mark.row("S077")
def test_the_second_answer_is_compared_with_the_first_ones_of_the_group() -> None:
    # R(y0) = 1, 0, 0, 0: baseline 1/4. R(y1) = 1, 1, 0, 1: A = 3/4, 3/4, -1/4, 3/4; first answers have 0.
    estimator = make_estimator("first_turn_baseline", {"turn_correct": 1.0})
    outcomes = [(1.0, 1.0), (0.0, 1.0), (0.0, 0.0), (0.0, 1.0)]
    members = [of_turns(f"s{n}", *values) for n, values in enumerate(outcomes)]
    found = estimator.of_turns(group("g", *members))  # type: ignore[attr-defined]
    assert [values.tolist() for values in found.values()] == [[0, 0.75], [0, 0.75], [0, -0.25], [0, 0.75]]


@pytest.mark.row("S077")
def test_a_critique_is_in_no_mean_and_is_dropped_after_a_failure_of_the_infrastructure() -> None:
    estimator = make_estimator("first_turn_baseline", {"turn_correct": 1.0})
    answer, summary = of_turns("s0", 0.0, 1.0), SampleSummary(role="critique")
    rewards = [Reward(name="correct", value=0.0, outcome=o) for o in (Outcome.OK, Outcome.INFRA_FAILURE)]
    critiques = [
        MemberOutcome(sample_id=f"c{n}", rewards=(reward,), end="ready", summary=summary)
        for n, reward in enumerate(rewards)
    ]
    assert estimator.of_group(group("g", answer, *critiques)) == {"c0": 0.0, "s0": 1.0}
    right = [of_turns(f"s{n}", 1.0, 1.0) for n in range(4)]
    assert estimator.of_group(group("g", *right)) == {f"s{n}": 0.0 for n in range(4)}


@pytest.mark.row("S077")
def test_the_gradient_is_that_of_the_answer_after_the_task_alone() -> None:
    term = LOSSES.make("first_prompt")
    first = torch.tensor([-2.0, -1.0, -0.5], requires_grad=True)
    sampled = torch.tensor([-0.1, -0.1, -0.1], requires_grad=True)
    columns = {
        "first_prompt": first,
        "advantages": torch.tensor([0.75, 0.75, -0.25]),
        "token_weight": torch.tensor([0.5, 0.5, 1.0]),
    }
    loss, _ = term(LossInputs(logprobs=sampled, columns=columns))
    loss.backward()
    # loss = -(0.5 * 0.75 * -2 + 0.5 * 0.75 * -1 + 1 * -0.25 * -0.5) = 1.125 - 0.125
    assert loss.item() == pytest.approx(1.0)
    assert first.grad is not None
    assert first.grad.tolist() == [-0.375, -0.375, 0.25]
    assert sampled.grad is None

    between = replace(prompt([40]), role=Role.OBSERVATION, source=Source.TOOL)
    segments = [prompt([20, 21]), action([30, 31], [-1, -1]), between, action([50, 51, 52], [-1, -1, -1])]
    settings = load_train_config(FOLDER / "config.yaml", ["recipe=text_feedback"]).learner.features["first_prompt"]
    feature = OtherPromptLogprob(options=config_from_dict(OtherPromptOptions, settings.options))
    made = feature.sequences_of(training_sample("s", segments))
    assert made is not None
    assert [one.token_ids.tolist() for one in made] == [[20, 21, 30, 31], [20, 21, 50, 51, 52]]


async def critiqued(
    purpose: types_pb2.Purpose.ValueType, task: str = "2+2", **options: Any
) -> tuple[LocalMesh, Episode, list[str]]:
    asked: list[str] = []

    def critic(body: dict[str, Any]) -> str:
        asked.append(body["messages"][0]["content"])
        return "check the sum"

    async with chat_server(critic) as server:
        mesh = LocalMesh(script=lambda text: "<answer>4</answer><|end|>", endpoints=table(server, "critic"))
        agent = load_agent(Extension("text_feedback", options))
        await mesh.runner(agent).run(lease(messages=[task], purpose=purpose))
        await mesh.endpoints.close()
    (episode,) = mesh.samples.episodes
    return mesh, episode, asked


@pytest.mark.row("S077")
async def test_the_agent_reads_a_critique_and_answers_again_and_gives_the_critique_as_a_sample() -> None:
    mesh, episode, asked = await critiqued(types_pb2.PURPOSE_TRAIN, feedback_weight=0.5)
    answer, critique = episode.samples
    path = episode.path_segments(answer)
    assert [segment.role for segment in path] == [Role.CONTEXT, Role.ACTION, Role.OBSERVATION, Role.ACTION]
    assert "check the sum" in mesh.tokenizer.decode(path[2].token_ids)
    question = "Task: 2+2\nAnswer: <answer>4</answer>\nWhat is wrong with this answer? Do not give the solution."
    assert asked == [question]
    asks, given = episode.path_segments(critique)
    assert (critique.role, critique.weight, answer.role) == ("critique", 0.5, "")
    assert [message.content for message in asks.messages] == [question], (
        "the feedback prompt, without the first answer's log"
    )
    assert mesh.tokenizer.decode(given.token_ids) == "check the sum<|end|>"
    assert (given.source, given.num_trainable, given.logprobs) == (Source.DATASET, given.num_tokens, None)
    _, episode, _ = await critiqued(types_pb2.PURPOSE_TRAIN, feedback_weight=0.0)
    assert [sample.role for sample in episode.samples] == [""], "RLTF-SD"
    _, _, (question,) = await critiqued(types_pb2.PURPOSE_TRAIN, task="What is {answer}?")
    assert question.startswith("Task: What is {answer}?\nAnswer: <answer>4</answer>\n"), "texts are not filled again"


async def test_an_evaluation_has_no_critique() -> None:
    _, episode, asked = await critiqued(types_pb2.PURPOSE_EVAL)
    assert (len(episode.segments), asked) == (2, [])


@pytest.mark.row("S077")
def test_a_critique_is_in_no_baseline_and_its_loss_is_its_negative_log_likelihood() -> None:
    estimator = make_estimator("first_turn_baseline", {"turn_correct": 1.0})
    members = [of_turns(f"s{n}", *values) for n, values in enumerate([(1.0, 1.0), (0.0, 1.0)])]
    one = of_turns("c", 1.0, 1.0)
    critique = replace(one, summary=replace(one.summary, role="critique"))
    found = estimator.of_turns(group("g", *members, critique))  # type: ignore[attr-defined]
    assert {name: values.tolist() for name, values in found.items()} == {"s0": [0, 0.5], "s1": [0, 0.5], "c": [0]}
    losses = {
        term.name: term for term in load_train_config(FOLDER / "config.yaml", ["recipe=text_feedback"]).learner.loss
    }
    assert {name: (term.where, term.weight) for name, term in losses.items()} == {
        "first_prompt": ("policy", 1.0),
        "imitation": ("external", 0.1),
    }
    logprobs = torch.tensor([-2.0, -1.0], requires_grad=True)
    columns = {"token_weight": torch.tensor([0.5, 0.5])}
    loss, _ = LOSSES.make("imitation")(LossInputs(logprobs=logprobs, columns=columns))
    loss.backward()
    assert loss.item() == pytest.approx(1.5)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, -0.5]


async def test_each_turn_is_scored_by_its_own_answer() -> None:
    texts = ("<answer>41</answer>", "<answer>42</answer>")
    path = tuple(
        JudgedSegment(
            index=2 * n,
            role=Role.ACTION,
            source=Source.POLICY,
            token_ids=np.arange(3, dtype=np.int32),
            text=text,
            finish=FinishReason.STOP,
        )
        for n, text in enumerate(texts)
    )
    between = JudgedSegment(index=1, role=Role.OBSERVATION, source=Source.TOOL, token_ids=np.arange(2, dtype=np.int32))
    whole = replace(item(*texts), leaf=2, path=(path[0], between, path[1]))
    scorer = ScorerConfig(name="turn_answer", reward="turn_correct")
    engine = build_engine(RewardConfig(scorers=(scorer,)), FOLDER)
    (rewards,) = await engine.score([whole])
    assert [(reward.segment, reward.value) for reward in rewards] == [(0, 0.0), (2, 1.0)]
    ((ignored,),) = await engine.score([replace(whole, role="critique")])
    assert ignored.outcome is Outcome.NOT_APPLICABLE
    ((ignored,),) = await engine.score([replace(whole, path=())])
    assert (ignored.outcome, ignored.evidence) == (Outcome.NOT_APPLICABLE, "the sample has no turn")
    plain = replace(whole, path=(replace(path[0], text="42 "), between, replace(path[1], text="41")))
    engine = build_engine(RewardConfig(scorers=(replace(scorer, options={"pattern": ""}),)), FOLDER)
    (rewards,) = await engine.score([plain])
    assert [(reward.segment, reward.value) for reward in rewards] == [(0, 1.0), (2, 0.0)], "the whole text of a turn"


# All of them ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["flawed_positives", "reward_ensemble", "text_feedback"])
def test_check_accepts_a_run_with_the_recipe(recipe: str) -> None:
    assert find_mistakes(load_train_config(FOLDER / "config.yaml", [f"recipe={recipe}"]), FOLDER) == []
