"""Scorers of single papers: values by hand, against a policy with known probabilities and endpoints that answer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.services.reward.config import RewardConfig, ScorerConfig, build_engine
from rollmesh.services.reward.item import TEXT_CHARS_MAX, AnswerKey, JudgedSegment, ScoreItem, TaskView
from rollmesh.services.reward.scorer import SCORERS, Scorer
from rollmesh.services.reward.scorers.process_reward import Form, refine
from rollmesh.shared.clients.generated import ScoredTokens
from rollmesh.shared.clients.given_tokens import Prompt
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    FinishReason,
    IntArray,
    MemberOutcome,
    Message,
    Outcome,
    Reward,
    Role,
    Source,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.endpoints.client import Endpoints
from rollmesh.shared.endpoints.config import EndpointConfig
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.estimators.base import make_estimator

from ..shared.chat_server import ChatServer, chat_server
from ..trainer.builders import action, group, member, prompt, training_sample

VERSION = PolicyVersion(policy="main", step=3)
TASK = Message(role="user", content="Where is it?")


def ids(text: str) -> IntArray:
    return np.array([ord(char) for char in text], dtype=np.int32)


def conversation(*turns: tuple[str, str], answers: Sequence[str] = ("Paris",), **record: Any) -> ScoreItem:
    """Return an item with these (text of the model, result of a tool); no result: the model was not answered."""
    path = [JudgedSegment(index=0, role=Role.CONTEXT, source=Source.PROMPT, token_ids=ids("?"))]
    messages = [TASK]
    for said, result in turns:
        path.append(
            JudgedSegment(
                index=len(path),
                role=Role.ACTION,
                source=Source.POLICY,
                token_ids=ids(said),
                text=said,
                finish=FinishReason.STOP,
            )
        )
        messages.append(Message(role="assistant", content=said))
        if result:
            path.append(
                JudgedSegment(
                    index=len(path), role=Role.OBSERVATION, source=Source.TOOL, token_ids=ids(result), text=result
                )
            )
            messages.append(Message(role="tool", content=result))
    return replace(
        _EMPTY,
        answer_key=AnswerKey(answers=tuple(answers), record=record),
        messages=tuple(messages),
        path=tuple(path),
        leaf=path[-1].index,
    )


def _empty() -> ScoreItem:
    from . import builders

    return replace(builders.item(), task=TaskView(task_id="t", messages=(TASK,)))


_EMPTY = _empty()


async def judged(server: ChatServer, name: str, options: Mapping[str, Any], *items: ScoreItem) -> list[list[Reward]]:
    """Score with the engine of the reward service; every endpoint of the options is the server."""
    entry = {"kind": "openai", "base_url": server.url, "model": "m", "retry_s": 0.0}
    names = ("judge", "process_reward_model")
    endpoints = Endpoints({judge: config_from_dict(EndpointConfig, entry) for judge in names})
    config = RewardConfig(scorers=(ScorerConfig(name=name, options=dict(options)),))
    engine = build_engine(config, endpoints=endpoints)
    try:
        return [list(rewards) for rewards in await engine.score(items)]
    finally:
        await engine.close()
        await endpoints.close()


# ASearcher ------------------------------------------------------------------------------------------------------------

SEARCH = "<tool_call>capital of France</tool_call>"


@pytest.mark.row("S014")
@pytest.mark.parametrize(
    ("turns", "value"),
    [
        ([(SEARCH, "id: fr"), ("I know. <answer>Paris</answer>", "")], 1.0),
        ([(SEARCH, "id: fr"), ("<answer>the city of Paris</answer> \n", "")], 0.5),  # P 1/3, R 1/1
        ([(SEARCH, "id: fr"), ("<answer>London</answer>", "")], 0.0),
        ([(SEARCH + " and now", "id: fr"), ("<answer>Paris</answer>", "")], 0.0),
        ([(SEARCH + SEARCH, "id: fr"), ("<answer>Paris</answer>", "")], 0.0),
        ([("<tool_call>capital", "error: "), ("<answer>Paris</answer>", "")], 0.0),
        ([("</tool_call>x<tool_call>", "error: "), ("<answer>Paris</answer>", "")], 0.0),
        ([("hm", "error: "), ("<answer>Paris</answer>", "")], 0.0),
        ([(SEARCH, "id: fr"), ("<answer>London</answer><answer>Paris</answer>", "")], 0.0),
        ([(SEARCH, "id: fr"), (f"{SEARCH}<answer>Paris</answer>", "")], 0.0),
        ([(SEARCH, "id: fr"), (SEARCH, "")], 0.0),
        ([("", "")], 0.0),
        ([("<answer></answer>", "")], 0.0),
        ([(SEARCH, "id: fr"), ("<answer>The question is invalid.</answer>", "")], -0.5),
        ([("hm", ""), ("<answer>The question is invalid.</answer>", "")], 0.0),
    ],
)
async def test_a_search_answer_is_worth_its_f1_if_every_turn_is_well_formed(
    turns: list[tuple[str, str]], value: float
) -> None:
    scorer: Scorer = SCORERS.make(Extension("search_answer"))
    reward = await scorer.score(conversation(*turns))
    assert isinstance(reward, Reward)
    assert reward.value == value


async def test_an_invalid_question_may_be_declared_invalid_and_a_written_answer_has_turns() -> None:
    scorer: Scorer = SCORERS.make(Extension("search_answer"))
    invalid = conversation(("<answer>The question is invalid.</answer>", ""), answers=["invalid question"])
    reward = await scorer.score(invalid)
    assert isinstance(reward, Reward)
    assert reward.value == pytest.approx(0.8)  # `question is invalid` against `invalid question`: P 2/3, R 2/2
    written = await scorer.score(replace(conversation(("hm", "x"), ("<answer>Paris</answer>", "")), path=()))
    assert isinstance(written, Reward)
    assert (written.value, written.evidence) == (0.0, "turn 1 is not well-formed")


# DARL -----------------------------------------------------------------------------------------------------------------


class TablePolicy:
    """Implements `Policy`: the probability of each token depends on it and on whether there was a reasoning."""

    def __init__(self, after: Mapping[str, float], directly: Mapping[str, float] | None = None) -> None:
        self.tables = {True: after, False: directly or {}}
        self.asked: list[tuple[str, str]] = []

    async def logprobs_of(
        self,
        pairs: Sequence[tuple[Prompt, Sequence[int] | IntArray]],
        *,
        step: int | PolicyVersion | None = None,
        outputs: Sequence[str] = (),
    ) -> list[ScoredTokens]:
        found = []
        for under, tokens in pairs:
            text = "".join(chr(int(token)) for token in tokens)
            before = "".join(chr(int(token)) for token in under)  # type: ignore[arg-type]
            self.asked.append((before, text))
            table = self.tables[before != "?"]
            logprobs = np.array([math.log(table[char]) for char in text], dtype=np.float32)
            found.append(ScoredTokens(logprobs=logprobs, arrays={}, version=VERSION))
        return found

    async def logprobs(
        self,
        token_ids: Sequence[int] | IntArray,
        *,
        under: Prompt,
        step: int | PolicyVersion | None = None,
        outputs: Sequence[str] = (),
    ) -> ScoredTokens:
        return (await self.logprobs_of([(under, token_ids)], step=step, outputs=outputs))[0]

    def encode(self, text: str) -> IntArray:
        return ids(text)


async def reference_reward(policy: TablePolicy, item: ScoreItem, **options: Any) -> Reward:
    scorer: Scorer = SCORERS.make(Extension("reference_prob", options))
    scorer.use_policy(policy)
    reward = await scorer.score(item)
    assert isinstance(reward, Reward)
    return reward


@pytest.mark.row("S096")
async def test_the_reference_probability_reward_is_flat_inside_the_range() -> None:
    item = conversation(("It is in France: <answer>b</answer>", ""), answers=["aa"])
    values = {}
    for p in (0.2, 0.4, 0.79, 0.8, 0.9, 1.0):
        policy = TablePolicy({"a": p, "b": 0.5})
        values[p] = (await reference_reward(policy, item, range=0.2)).value
    assert values == {
        p: pytest.approx(v) for p, v in {0.2: 0.25, 0.4: 0.5, 0.79: 0.9875, 0.8: 1, 0.9: 1, 1.0: 1}.items()
    }
    assert policy.asked == [
        ("?It is in France: <answer>", "b"),
        ("?It is in France: <answer>", "aa"),
    ], "the reference stands in place of the answer"


async def test_the_probability_is_a_mean_over_tokens_of_the_best_reference_and_less_that_without_reasoning() -> None:
    item = conversation(("So <answer>ab</answer>", ""), answers=["ac", "d"])
    after, directly = {"a": 0.9, "b": 0.3, "c": 0.1, "d": 0.4}, {"a": 0.2, "c": 0.2, "d": 0.3}
    found = await reference_reward(TablePolicy(after, directly), item, range=0.0)
    assert found.value == pytest.approx((0.9 + 0.1) / 2), "a product would be 0.09, and `d` has 0.4"
    assert found.evidence == "probability of the reference 0.5000, of the answer 0.6000"
    found = await reference_reward(TablePolicy(after, directly), item, range=0.5, debias=True)
    assert found.value == pytest.approx(0.5 / 0.5 - 0.2 / 0.5)
    likely = {"a": 0.9, "c": 0.9, "d": 0.1}
    assert (await reference_reward(TablePolicy(after, likely), item, range=0.0, debias=True)).value == 0.0


async def test_a_sample_without_an_answer_asks_nothing_and_one_without_its_tokens_is_encoded() -> None:
    policy = TablePolicy({"a": 0.5, "b": 0.5})
    item = conversation(("It is a.", ""), answers=["a"])
    assert (await reference_reward(policy, item)).value == 0.0
    assert policy.asked == []
    item = conversation(("So <answer>b</answer>", ""), answers=["a"])
    others = replace(item.path[1], token_ids=np.array([1, 2, 3], dtype=np.int32))  # tokens that merge over the answer
    await reference_reward(policy, replace(item, path=(item.path[0], others)))
    assert policy.asked == [("?So <answer>", "b"), ("?So <answer>", "a")]
    with pytest.raises(ConfigError, match="`where` must be final, got 'episode'"):
        SCORERS.make(Extension("reference_prob", {"where": "episode"}))


# Clip and Delta -------------------------------------------------------------------------------------------------------


@pytest.mark.row("S098")
@pytest.mark.parametrize(
    ("form", "expected"),
    # r = 0.9, 0.4, 0.7 and eta = 0.5.
    [
        ("raw", [0.9, 0.4, 0.7]),
        ("clip", [0.0, -0.1, 0.0]),
        ("delta", [0.5, -0.3, 0.7]),
        ("clip_delta", [0.1, -0.1, 0.0]),
    ],
)
def test_rewards_of_steps_by_hand_and_the_sum_from_a_step_is_its_own_reward(form: Form, expected: list[float]) -> None:
    scores = [0.9, 0.4, 0.7]
    rewards = refine(scores, form, 0.5)
    assert rewards == pytest.approx(expected)
    if form == "delta":
        assert [sum(rewards[k:]) for k in range(3)] == pytest.approx(scores)
    if form == "clip_delta":
        assert [sum(rewards[k:]) for k in range(3)] == pytest.approx([min(score - 0.5, 0) for score in scores])


@pytest.mark.row("S098")
@pytest.mark.parametrize("steps", ["turns", "paragraphs"])
async def test_a_repeated_step_does_not_raise_the_total(steps: str) -> None:
    scores = {"good": 0.9, "fine": 0.8, "bad": 0.2}

    def rate(body: dict[str, Any]) -> str:
        lines = body["messages"][0]["content"].partition(" steps\n")[2].partition("\nDATA-")[0].splitlines()
        return json.dumps([scores[line.split()[-1]] for line in lines])

    def episode(*said: str) -> ScoreItem:
        return conversation(*((text, "ok") for text in said[:-1]), (said[-1], ""))

    once, repeated, worse = episode("good", "fine"), episode("good", *["good"] * 9, "fine"), episode("good", "bad")
    totals: dict[str, list[float]] = {}
    async with chat_server(rate) as server:
        for form in ("raw", "clip", "delta", "clip_delta"):
            options = {"form": form, "steps": steps, "eta": 0.5}
            found = await judged(server, "process_reward", options, once, repeated, worse)
            totals[form] = [sum(reward.value for reward in rewards) for rewards in found]
            if steps == "turns":
                assert [reward.segment for reward in found[0]] == [1, 3]
    assert totals["raw"] == pytest.approx([1.7, 9.8, 1.1]), "nine more correct steps earn 8.1"
    assert totals["clip"] == pytest.approx([0.0, 0.0, -0.3])
    assert totals["delta"] == pytest.approx([0.9, 0.9, 0.9])
    assert totals["clip_delta"] == pytest.approx([0.0, 0.0, 0.0])


def test_returns_of_delta_rewards_are_bounded_at_each_turn_of_the_recipe() -> None:
    """The estimator of the recipe sums the rewards from a turn on: with delta it is the reward of this step."""
    estimator = make_estimator(Extension("trloo", {"discount": 1.0}), {"process": 1.0})
    members = []
    for name, scores in (("a", [0.9, 0.4]), ("b", [0.2, 0.6])):
        segments = [prompt([20, 21]), action([30, 31], [-1, -1]), prompt([40]), action([50, 51], [-1, -1])]
        made = member(name, {}, of=training_sample(name, segments))
        rewards = [
            Reward(name="process", value=value, segment=turn.segment)
            for value, turn in zip(refine(scores, "delta", 0.0), made.summary.turns, strict=True)
        ]
        members.append(
            MemberOutcome(sample_id=name, rewards=tuple(rewards), end="ready", episode=name, summary=made.summary)
        )
    found = estimator.of_turns(group("g", *members))  # type: ignore[attr-defined]
    assert found["a"] == pytest.approx([0.9 - 0.2, 0.4 - 0.6])
    assert found["b"] == pytest.approx([0.2 - 0.9, 0.6 - 0.4])


@pytest.mark.parametrize(
    "reply", ["", "0.5", "[0.5]", "[0.5, 0.5, 0.5]", '[0.5, "1"]', "[0.5, true]", "[0.5, 1.5]", "{}"]
)
async def test_a_process_reward_model_that_returns_something_else_is_a_failure(reply: str) -> None:
    async with chat_server(lambda body: reply) as server:
        ((reward,),) = await judged(server, "process_reward", {}, conversation(("a", "x"), ("b", "")))
    assert reward.outcome is Outcome.INFRA_FAILURE
    assert reward.scorer == "process_reward@1"


async def test_the_last_step_is_not_scored_if_the_success_judges_it() -> None:
    async with chat_server(lambda body: "[0.25]") as server:
        options = {"score_last": False, "form": "delta"}
        (two, one) = await judged(
            server, "process_reward", options, conversation(("a", "x"), ("b", "")), conversation(("b", ""))
        )
    assert [(reward.segment, reward.value) for reward in two] == [(1, 0.25)]
    assert [reward.outcome for reward in one] == [Outcome.NOT_APPLICABLE]
    assert len(server.requests) == 1


# StableReinforce ------------------------------------------------------------------------------------------------------


@pytest.mark.row("S032")
async def test_a_right_answer_that_contradicts_its_reasoning_earns_less() -> None:
    def judge(body: dict[str, Any]) -> str:
        asked.append(body["messages"][0]["content"])
        return json.dumps({"consistent": "so 1 is better" in asked[-1]})

    asked: list[str] = []
    right = "<think>Both are close.\nLet us see.\n\nLength differs,\nso 1 is better</think><answer>1</answer>"
    texts = [right, right.replace("so 1", "so 2"), right[7:], right[7:].replace("so 1", "so 2")]
    texts += [right.replace(">1<", ">2<"), "2", ""]
    items = [conversation((text, ""), answers=["1"]) for text in texts]
    async with chat_server(judge) as server:
        found = await judged(server, "consistent", {}, *items)
        negative = await judged(server, "consistent", {"inconsistent": -1.0}, items[1])
    # 0.5 format + result (1 + 0.5 consistency)
    assert [reward.value for (reward,) in found] == [2.0, 1.5, 1.5, 1.0, 0.5, 0.0, 0.0]
    assert [reward.value for (reward,) in negative] == [1.0]
    assert len(asked) == 5, "only right answers are judged"
    assert "Both are close" not in asked[0], "the judge reads the end of the reasoning"
    assert "Where is it?" not in asked[0]


async def test_the_format_of_a_long_text_is_that_of_all_of_it() -> None:
    text = f"<think>{'x ' * TEXT_CHARS_MAX}</think><answer>2</answer>"
    scorer: Scorer = SCORERS.make(Extension("consistent"))
    reward = await scorer.score(conversation((text, ""), answers=["1"]))
    assert isinstance(reward, Reward)
    assert reward.value == 0.5


@pytest.mark.parametrize("reply", ["", "yes", "1", '{"consistent": "yes"}', '{"consistent": 1}', "[true]"])
async def test_a_judge_of_consistency_that_returns_something_else_is_a_failure(reply: str) -> None:
    async with chat_server(lambda body: reply) as server:
        item = conversation(("<think>1</think><answer>1</answer>", ""), answers=["1"])
        ((reward,),) = await judged(server, "consistent", {}, item)
    assert reward.outcome is Outcome.INFRA_FAILURE


# IM-RAG ---------------------------------------------------------------------------------------------------------------


@pytest.mark.row("S092")
async def test_the_progress_of_turns_is_the_evidence_that_they_add() -> None:
    scorer: Scorer = SCORERS.make(Extension("progress"))
    first = "[1] Babbage\nid: babbage\nurl: https://wiki.test\nDesigned it.\n\n[2] Other\nid: other\nText"
    again = "[1] Babbage\nid: babbage\nText\n\n[2] Ada\nid: ada \nid: babbage"
    made = conversation(
        ("q1", first), ("q2", again), ("q3", "no results"), ("done", ""), evidence=["babbage", "ada", "turing"]
    )
    rewards = await scorer.score(made)
    assert not isinstance(rewards, Reward | float)
    assert [(r.segment, r.value) for r in rewards] == [(1, 1 / 3), (3, 1 / 3), (5, 0.0), (7, 0.0)]
    assert "ada" not in " ".join(reward.evidence for reward in rewards)


async def test_text_of_the_model_is_not_evidence() -> None:
    scorer: Scorer = SCORERS.make(Extension("progress"))
    rewards = await scorer.score(conversation(("id: ada", ""), evidence=["ada"]))
    assert not isinstance(rewards, Reward | float)
    assert [reward.value for reward in rewards] == [0.0]
    without = await scorer.score(conversation(("id: ada", "")))
    assert isinstance(without, Reward)
    assert without.outcome is Outcome.NOT_APPLICABLE
    with pytest.raises(TypeError, match="`evidence` of the task must be a list of ids"):
        await scorer.score(conversation(("id: ada", ""), evidence="ada"))
