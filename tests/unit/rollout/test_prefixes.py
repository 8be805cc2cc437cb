"""Agents that begin an answer with given tokens: prefixes of a solution, and of an answer of the policy."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from rollmesh.services.reward.item import judged_path
from rollmesh.services.rollout.agent import Agent, load_agent
from rollmesh.services.rollout.agents.prefix import PrefixAgent, PrefixOptions
from rollmesh.services.rollout.agents.single_turn import SingleTurnAgent
from rollmesh.services.rollout.config import LimitsConfig, RolloutConfig
from rollmesh.shared.codec.trajectory import decode_segment
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    Episode,
    GroupContext,
    MemberOutcome,
    Reward,
    Role,
    Source,
)
from rollmesh.shared.errors import ConfigError
from rollmesh.testing.rollout import LocalMesh, lease
from rollmesh.trainer.estimators import make_estimator
from rollmesh.v1 import coordinator_pb2, types_pb2

from .table_policy import END, Table, TableGenerator, answers, table_mesh

SOLUTION = "12345678"
"""Nine tokens with the one that ends the turn."""
COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED


def agent(name: str, **options: Any) -> Agent:
    return load_agent(Extension(name, options))


async def played(
    chosen: Agent,
    script: Callable[[str], str] = lambda text: "<answer>3</answer><|end|>",
    *,
    solution: str = SOLUTION,
    **given: Any,
) -> tuple[LocalMesh, Episode]:
    mesh = LocalMesh(script=script, functions={"call": lambda text: "7"}, private_extras={"solution": solution})
    report = await mesh.runner(chosen).run(lease(**given))
    assert report.outcome == COMPLETED, report.failure
    return mesh, mesh.samples.episodes[-1]


def judged(mesh: LocalMesh, sample: int = 0) -> list[str]:
    """The text of a sample, as scorers read it."""
    (item,) = mesh.scorer.items
    path = [decode_segment(segment) for segment in item.segments]
    return [message.content for message in judged_path(path, item.samples[sample].leaf)[1]]


def given_text(mesh: LocalMesh, episode: Episode) -> str:
    """The tokens of answers that the agent gave."""
    given = [s for s in episode.segments if s.role is Role.ACTION and s.source is not Source.POLICY]
    return "".join(mesh.tokenizer.decode(segment.token_ids) for segment in given)


# Prefixes of a solution -----------------------------------------------------------------------------------------------


@pytest.mark.row("S080")
@pytest.mark.row("S091")
async def test_tokens_of_a_given_prefix_are_not_trained_and_are_scored() -> None:
    mesh, episode = await played(agent("prefix", share_min=0.4, share_max=0.5))  # 4 of 9 tokens
    _, prefix, sampled = episode.segments
    assert (prefix.role, prefix.source) == (Role.ACTION, Source.DATASET)
    assert (prefix.num_tokens, prefix.num_trainable, prefix.logprobs) == (4, 0, None)
    assert sampled.num_trainable == sampled.num_tokens > 0
    (prompt, _, _) = mesh.generator.asked[0]
    assert mesh.tokenizer.decode(prompt).endswith("<|assistant|>1234"), "the engine continues the prefix"
    assert judged(mesh) == ["1+2", "1234<answer>3</answer>"], "the reward is that of the whole text"


async def test_a_call_that_begins_in_the_prefix_is_executed() -> None:
    said = iter([")</tool_call><|end|>", "<answer>7</answer><|end|>"])
    solution = "<tool_call>3+4"  # with the end of the turn six tokens, of which five are given
    chosen = agent("prefix", share_min=0.8)
    mesh, episode = await played(chosen, lambda text: next(said), solution=solution, tools=["calculator"])
    assert given_text(mesh, episode) == solution[: len("<tool_call>3+4")]
    assert judged(mesh)[1:] == ["<tool_call>3+4)</tool_call>", "7", "<answer>7</answer>"]


async def lengths(chosen: Agent, episodes: int, solution: str | None = SOLUTION, **given: Any) -> list[int]:
    """The lengths of the prefixes of the episodes of a group."""
    mesh = LocalMesh(script=lambda text: "<answer>3</answer><|end|>", private_extras={"solution": solution})
    for number in range(episodes):
        report = await mesh.runner(chosen).run(lease(**{"lease_id": str(number), **given}))
        assert report.outcome == COMPLETED, report.failure
    return [sum(s.num_tokens for s in e.segments if s.source is Source.DATASET) for e in mesh.samples.episodes]


@pytest.mark.row("S091")
async def test_the_share_of_episodes_that_start_from_a_prefix_is_the_probability() -> None:
    assert set(await lengths(agent("prefix", draw="episode"), 50)) == set(range(1, 9)), "from one token to all but one"
    assert await lengths(agent("prefix", draw="episode", probability=0.0), 10) == [0] * 10
    some = await lengths(agent("prefix", draw="episode", probability=0.25), 60)
    assert 7 <= np.count_nonzero(some) <= 23
    assert some == await lengths(agent("prefix", draw="episode", probability=0.25), 60, attempt=2), "as a retry"


@pytest.mark.parametrize(
    ("least", "most", "num_parts", "found"),
    [(0.0, 1.0, 5, {1, 2, 3, 4}), (0.5, 0.75, 8, {4, 5, 6}), (0.9, 1.0, 4, set()), (0.0, 1.0, 1, set())],
)
def test_lengths_are_uniform_over_the_shares(least: float, most: float, num_parts: int, found: set[int]) -> None:
    chosen, rng = PrefixAgent(options=PrefixOptions(share_min=least, share_max=most)), random.Random(0)
    drawn = Counter(chosen.length(rng, num_parts) for _ in range(4000))
    assert set(drawn) == (found or {0})
    assert max(drawn.values()) < 1.15 * min(drawn.values())


async def test_the_episodes_of_a_group_have_one_prefix_and_evaluations_have_none() -> None:
    assert len(set(await lengths(agent("prefix"), 8))) == 1
    assert await lengths(agent("prefix"), 2, purpose=types_pb2.PURPOSE_EVAL) == [0, 0]
    for empty in ("", None):
        assert await lengths(agent("prefix"), 2, solution=empty) == [0, 0], "a task without a solution"


async def test_a_task_without_the_solution_fails_the_attempt_and_names_the_setting() -> None:
    mesh = LocalMesh(script=lambda text: "<answer>3</answer><|end|>")
    report = await mesh.runner(agent("prefix")).run(lease(labels={"solution": SOLUTION}))
    assert "the task t has no private extra `solution`; name its field in data.source.options.private_extras" in (
        report.failure.message
    )
    assert "remove the label `solution`, which every process of the run can read" in report.failure.message
    with pytest.raises(ConfigError, match="`share_min` must be <= share_max = 0.2, got 0.5"):
        agent("prefix", share_min=0.5, share_max=0.2)


# Learning with a table as the policy ----------------------------------------------------------------------------------


class Learner:
    """A policy with one parameter per kind of token, and gradients of GRPO on the tokens that are trained."""

    def __init__(self, kinds: Callable[[str], str | None], choices: Mapping[str, str], start: float, lr: float) -> None:
        """`kinds` returns the kind of the next token of an answer, None at its end; `choices` its two tokens."""
        self._kinds, self._choices, self._lr = kinds, choices, lr
        self.logits = dict.fromkeys(choices, start)

    def table(self, answer: str) -> Mapping[str, float]:
        if (kind := self._kinds(answer)) is None:
            return {END: 1.0}
        p = self.p(kind)
        return dict(zip(self._choices[kind], (p, 1.0 - p), strict=True))

    def p(self, kind: str) -> float:
        return float(1.0 / (1.0 + np.exp(-self.logits[kind])))

    def entropy(self) -> float:
        p = np.array([self.p(kind) for kind in self._choices])
        return float(-(p * np.log(p) + (1 - p) * np.log(1 - p)).mean())

    async def update(self, chosen: Agent, num_episodes: int, number: int, reward: Callable[[str], float]) -> None:
        """One update with one group."""
        mesh, _ = table_mesh(
            self.table,
            config=RolloutConfig(outputs=("entropy",)),
            rewards=lambda text: (Reward(name="r", value=reward(text)),),
            private_extras={"solution": "a" * 6},
        )
        runner = mesh.runner(chosen)
        for episode in range(num_episodes):
            given = lease(lease_id=f"{number}-{episode}", seed=1000 * number + episode)
            given.key.group = str(number)
            assert (await runner.run(given)).outcome == COMPLETED
        samples = [(e, sample) for e in mesh.samples.episodes for sample in e.samples]
        members = [
            MemberOutcome(sample_id=s.sample_id, end="ready", episode=e.key.episode, rewards=s.rewards)
            for e, s in samples
        ]
        advantages = make_estimator("grpo").of_group(GroupContext(group="g", task="t", members=tuple(members)))
        gradient: dict[str, float] = defaultdict(float)
        for episode_of, sample in samples:
            answer = ""
            for segment in episode_of.path_segments(sample)[1:]:
                for token in segment.token_ids.tolist():
                    kind = self._kinds(answer)
                    if kind is not None and segment.num_trainable:
                        first = chr(token) == self._choices[kind][0]
                        gradient[kind] += advantages[sample.sample_id] * (float(first) - self.p(kind))
                    answer += mesh.tokenizer.decode(np.array([token]))
        for kind, value in gradient.items():
            self.logits[kind] += self._lr * value / len(samples)


@pytest.mark.row("S080")
@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_training_with_prefixes_only_raises_the_success_without_a_prefix(seed: int) -> None:
    """An answer is right if all of its six tokens are. GRPO without prefixes samples no right answer."""

    def right(text: str) -> float:
        return float(text == "a" * 6)

    def kind(answer: str) -> str | None:
        return "step" if len(answer) < 6 else None

    found = {}
    for name, chosen in (("prefix", agent("prefix")), ("plain", SingleTurnAgent())):
        policy = Learner(kind, {"step": "ab"}, start=-1.5, lr=4.0)
        before = policy.p("step") ** 6
        for number in range(12):
            await policy.update(chosen, 8, 100 * seed + number, right)
        found[name] = policy.p("step") ** 6
    assert before < 1e-4
    assert found["plain"] < 0.01
    assert found["prefix"] > 0.1


# Continuations from an uncertain token --------------------------------------------------------------------------------


def forked(answer: str) -> Mapping[str, float]:
    """Six letters, of which the third and the fifth are uncertain."""
    if len(answer) == 6:
        return {END: 1.0}
    p = {2: 0.5, 4: 0.6}.get(len(answer), 0.99)
    return {"ab"[len(answer) % 2]: p, "c": 1.0 - p}


async def continued(
    num_episodes: int, *, table: Table = forked, limits: LimitsConfig | None = None, **options: Any
) -> tuple[LocalMesh, TableGenerator]:
    config = RolloutConfig(outputs=("entropy",), limits=limits or LimitsConfig())
    mesh, generator = table_mesh(table, config=config)
    runner = mesh.runner(agent("cure", **{"chars_min": 1, "num_top": 1, **options}))
    for number in range(num_episodes):
        report = await runner.run(lease(lease_id=str(number), seed=number))
        assert report.outcome == COMPLETED, report.failure
    return mesh, generator


@pytest.mark.row("S075")
async def test_continuations_begin_before_a_token_of_high_entropy_and_share_it_with_their_answer() -> None:
    mesh, generator = await continued(4)
    prompts = [stream.answer for stream in generator.streams]
    episodes = mesh.samples.episodes
    assert len({episode.key.group for episode in episodes}) == 1
    members = []
    for number, episode in enumerate(episodes):
        first, *rest = answers(mesh, number)
        assert len(rest) == 3
        assert prompts[4 * number : 4 * number + 4] == ["", *[first[:2]] * 3], (
            "the third letter has the largest entropy"
        )
        assert all(answer.startswith(first[:2]) for answer in rest)
        for sample in episode.samples[1:]:
            _, given, sampled = episode.path_segments(sample)
            assert (given.num_tokens, given.num_trainable, given.logprobs) == (2, 0, None)
            assert sampled.num_trainable == sampled.num_tokens == 5
        assert episode.path_segments(episode.samples[0])[1].num_trainable == 7, (
            "the answer itself is trained as a whole"
        )
        rewards = [Reward(name="r", value=float(a[2] == "a")) for a in (first, *rest)]
        members += [
            MemberOutcome(sample_id=f"{number}{n}", end="ready", episode=str(number), rewards=(reward,))
            for n, reward in enumerate(rewards)
        ]
    found = make_estimator("grpo").of_group(GroupContext(group="g", task="t", members=tuple(members)))
    values = np.array([member.rewards[0].value for member in members])
    assert 0 < values.mean() < 1
    expected = (values - values.mean()) / (values.std() + 1e-6)
    assert list(found.values()) == pytest.approx(expected), "all 16 answers are one group"


async def test_an_answer_that_fills_the_context_is_continued_from_where_there_is_room() -> None:
    """The prompt has 6 tokens and the answer 7."""
    _, generator = await continued(1, limits=LimitsConfig(context_tokens_max=13))
    assert len(generator.streams) == 4


async def test_one_of_the_valid_tokens_of_largest_entropy_is_drawn() -> None:
    _, generator = await continued(24, num_top=2, num_continuations=1)
    places = Counter(len(stream.answer) for stream in generator.streams[1::2])
    assert set(places) == {2, 4}
    assert min(places.values()) >= 6
    _, generator = await continued(2, chars_min=2)
    assert {stream.answer for stream in generator.streams} == {""}, "no token is valid, so all begin at the prompt"


async def test_an_answer_with_tool_calls_continues_in_the_turn_of_its_token() -> None:
    said = ["<tool_call>1+2</tool_call><|end|>", "<answer>7</answer><|end|>"]
    mesh = LocalMesh(
        script=lambda text: said["<|tool|>" in text].removeprefix(text.rpartition("<|assistant|>")[2]),
        functions={"call": lambda text: "7"},
        config=RolloutConfig(outputs=("entropy",)),
        column=lambda array, text: 2.0 if text == "+" else 0.0,
    )
    await mesh.runner(agent("cure", chars_min=1, num_top=1, num_continuations=1)).run(lease(tools=["calculator"]))
    assert judged(mesh, 0) == judged(mesh, 1) == ["1+2", "<tool_call>1+2</tool_call>", "7", "<answer>7</answer>"]
    assert mesh.tokenizer.decode(mesh.generator.asked[2][0]).endswith("<tool_call>1")
    assert mesh.sandbox.calling.num_entered == 2


async def test_entropies_that_the_engine_does_not_return_and_evaluations() -> None:
    mesh = LocalMesh(script=lambda text: "<answer>3</answer><|end|>")
    report = await mesh.runner(agent("cure")).run(lease())
    assert "add it to rollout.outputs" in report.failure.message
    await mesh.runner(agent("cure")).run(lease(purpose=types_pb2.PURPOSE_EVAL))
    assert len(mesh.samples.episodes[-1].samples) == 1


@pytest.mark.row("S075")
async def test_entropy_stays_above_that_of_groups_of_sixteen_answers() -> None:
    """Both train 16 answers per update, with the same estimator. The reward needs the first and the last letter."""

    def kind(answer: str) -> str | None:
        return str(len(answer)) if len(answer) < 4 else None

    def right(text: str) -> float:
        return float(text[0] == text[-1] == "a")

    for seed in range(2):
        entropies = {}
        for name, chosen, episodes in (
            ("cure", agent("cure", chars_min=1, num_top=2), 4),
            ("plain", SingleTurnAgent(), 16),
        ):
            policy = Learner(kind, {str(n): "ab" for n in range(4)}, start=0.0, lr=1.0)
            for number in range(10):
                await policy.update(chosen, episodes, 100 * seed + number, right)
            entropies[name] = policy.entropy()
            assert policy.p("0") * policy.p("3") > 0.5, "it was 0.25"
        assert entropies["cure"] > entropies["plain"] + 0.05
