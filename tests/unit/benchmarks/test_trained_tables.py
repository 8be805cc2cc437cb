"""Rewards against the ones that they replace, in policies that are tables: trained from samples with the scorers and
estimators of the recipes, in a second.

Each test trains both sides with the same seed and asserts the difference that the paper leads one to expect, or what is
found in its place. `benchmarks/README.md` has the figures, which `python -m tests.unit.benchmarks.test_trained_tables`
prints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Any, Literal, get_args

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from benchmarks.methods.scorers import RatedCalls
from rollmesh.services.reward.item import AnswerKey, JudgedSegment, ScoreItem, TaskView
from rollmesh.services.reward.scorers.process_reward import Form, ProcessRewardOptions
from rollmesh.services.reward.scorers.routing import RoutingOptions, RoutingScorer
from rollmesh.services.reward.scorers.try_again import TryAgainScorer, TryAgainScorerOptions
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    EndpointUse,
    EpisodeKey,
    FinishReason,
    GroupContext,
    MemberOutcome,
    Message,
    Reward,
    Role,
    SampleSummary,
    Source,
    TurnSummary,
)
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.estimators.trloo import Trloo

Logits = NDArray[np.float64]
Attempts = Literal["correct", "attempts"]
Accumulate = Literal["gated", "direct"]
SEEDS = (0, 1, 2)
ATTEMPTS_MAX, TURNS_MAX = 5, 6
GROUP_SIZE = 8
EVAL_EPISODES = 400
CALLS = ("<tool_call>12+7</tool_call>", "<tool_call>19-3</tool_call>")
"""The ideal calls of 12+7-3."""
RIGHT, WRONG, WRONG_CALL = "<answer>16</answer>", "<answer>0</answer>", "<tool_call>12-7</tool_call>"


@dataclass(frozen=True, slots=True)
class Played:
    """An episode of a table: the texts of its turns, and the state and choice of each."""

    turns: tuple[str, ...]
    choices: tuple[tuple[int, int], ...]
    is_right: bool

    @property
    def repeated(self) -> float:
        return 1 - len(set(self.turns)) / len(self.turns)


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over episodes of the trained policy."""

    success: float
    turns: float
    repeated: float


def softmax(logits: Logits) -> Logits:
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    found: Logits = odds / odds.sum(-1, keepdims=True)
    return found


def climb(logits: Logits, played: Sequence[Played], advantages: Sequence[Sequence[float]], lr: float) -> None:
    """Make a step of the policy gradient. `advantages` has those of each turn."""
    p, step = softmax(logits), np.zeros_like(logits)
    for episode, of_turns in zip(played, advantages, strict=True):
        for (state, choice), advantage in zip(episode.choices, of_turns, strict=True):
            step[state] -= advantage * p[state]
            step[state, choice] += advantage
    logits += lr / len(played) * step


# Attempts -------------------------------------------------------------------------------------------------------------


def play_attempts(logits: Logits, rng: np.random.Generator) -> Played:
    """Answer one of four digits up to five times, until it is right. Half of the questions have the answer 0, and half
    one that cannot be known. The state is the kind of the question and the number of the attempt."""
    is_hidden = int(rng.integers(2))
    right = int(rng.integers(4)) if is_hidden else 0
    return attempts(logits, rng, is_hidden, right)


def attempts(logits: Logits, rng: np.random.Generator, is_hidden: int, right: int) -> Played:
    turns, choices = list[str](), list[tuple[int, int]]()
    p = softmax(logits)
    for attempt in range(ATTEMPTS_MAX):
        state = ATTEMPTS_MAX * is_hidden + attempt
        choice = int(rng.choice(4, p=p[state]))
        choices.append((state, choice))
        turns.append(f"<answer>{choice}</answer>")
        if choice == right:
            return Played(tuple(turns), tuple(choices), is_right=True)
    return Played(tuple(turns), tuple(choices), is_right=False)


async def trained_by_attempts(reward: Attempts, seed: int, *, updates: int = 300, lr: float = 0.5) -> Figures:
    """Train with the reward of the recipe `try_again`, or with that of the last answer, by `grpo`."""
    scorer, estimator = TryAgainScorer(options=TryAgainScorerOptions()), make_estimator("grpo", {reward: 1.0})
    rng, logits = np.random.default_rng(seed), np.zeros((2 * ATTEMPTS_MAX, 4))
    for _ in range(updates):
        is_hidden = int(rng.integers(2))
        right = int(rng.integers(4)) if is_hidden else 0
        played = [attempts(logits, rng, is_hidden, right) for _ in range(GROUP_SIZE)]
        members = []
        for number, episode in enumerate(played):
            correct = Reward(name="correct", value=float(episode.is_right))
            scored = replace(item_of(episode.turns), rewards={"correct": (correct,)})
            shaped = replace(await scorer.score(scored), name="attempts")
            members.append(member(number, (correct, shaped), len(episode.turns)))
        advantages = estimator.of_group(group_of(members))
        whole = [[advantages[str(number)]] * len(episode.turns) for number, episode in enumerate(played)]
        climb(logits, played, whole, lr)
    return figures([play_attempts(logits, rng) for _ in range(EVAL_EPISODES)])


@pytest.mark.row("S070")
@pytest.mark.parametrize("seed", SEEDS)
async def test_decay_and_the_penalty_of_repetition_make_answers_fewer(seed: int) -> None:
    plain, shaped = await trained_by_attempts("correct", seed), await trained_by_attempts("attempts", seed)
    assert shaped.turns < plain.turns
    assert shaped.success > 0.85


# Rewards of steps -----------------------------------------------------------------------------------------------------


def play_calls(logits: Logits, rng: np.random.Generator) -> Played:
    """Play 12+7-3. The state is the number of ideal calls so far, and the choices are the next one, the last one again,
    a wrong call, and an answer, which is right after both ideal calls."""
    done, turns, choices = 0, list[str](), list[tuple[int, int]]()
    p = softmax(logits)
    while len(turns) < TURNS_MAX and (not turns or turns[-1] not in (RIGHT, WRONG)):
        choice = int(rng.choice(4, p=p[done]))
        choices.append((done, choice))
        if choice == 0 and done < len(CALLS):
            turns.append(CALLS[done])
            done += 1
        elif choice == 1 and done:
            turns.append(CALLS[done - 1])
        elif choice == 3:
            turns.append(RIGHT if done == len(CALLS) else WRONG)
        else:
            turns.append(WRONG_CALL)
    return Played(tuple(turns), tuple(choices), is_right=turns[-1] == RIGHT)


def item_of(turns: Sequence[str]) -> ScoreItem:
    """Return an episode of 12+7-3 with these turns, each followed by an observation."""
    none, prompt = np.zeros(0, np.int32), Message(role="user", content="12+7-3")
    path = [JudgedSegment(index=0, role=Role.CONTEXT, source=Source.PROMPT, token_ids=none)]
    for text in turns:
        for role, source in ((Role.ACTION, Source.POLICY), (Role.OBSERVATION, Source.TOOL)):
            path.append(
                JudgedSegment(
                    index=len(path),
                    role=role,
                    source=source,
                    token_ids=none,
                    text=text if role is Role.ACTION else "",
                    finish=FinishReason.STOP if role is Role.ACTION else FinishReason.UNFINISHED,
                )
            )
    return ScoreItem(
        key=EpisodeKey(run="r", task="t", group="g", episode="e"),
        task=TaskView(task_id="t", messages=(prompt,), labels={}),
        answer_key=AnswerKey(answers=("16",)),
        messages=(prompt,),
        sample_id="s",
        leaf=path[-2].index,
        path=tuple(path[:-1]),
    )


async def trained_by_steps(form: Form, seed: int, *, updates: int = 150, lr: float = 0.5) -> Figures:
    """Train with the reward of success and half of that of the steps, by `trloo`, as the recipe `clip_delta`."""
    scorer = RatedCalls(options=ProcessRewardOptions(form=form))
    estimator = make_estimator(Extension("trloo", {"discount": 1.0}), {"correct": 1.0, "process": 0.5})
    assert isinstance(estimator, Trloo)
    rng, logits = np.random.default_rng(seed), np.zeros((len(CALLS) + 1, 4))
    known: dict[tuple[str, ...], tuple[Reward, ...]] = {}
    for _ in range(updates):
        played = [play_calls(logits, rng) for _ in range(GROUP_SIZE)]
        members = []
        for number, episode in enumerate(played):
            if episode.turns not in known:
                found = await scorer.score(item_of(episode.turns))
                assert isinstance(found, list)
                steps = [Reward(name="process", value=one.value, segment=one.segment) for one in found]
                known[episode.turns] = (Reward(name="correct", value=float(episode.is_right)), *steps)
            members.append(member(number, known[episode.turns], len(episode.turns)))
        advantages = estimator.of_turns(group_of(members))
        climb(logits, played, [advantages[str(number)].tolist() for number in range(GROUP_SIZE)], lr)
    return figures([play_calls(logits, rng) for _ in range(EVAL_EPISODES)])


def member(number: int, rewards: tuple[Reward, ...], num_turns: int) -> MemberOutcome:
    turns = tuple(TurnSummary(segment=1 + 2 * turn, num_tokens=1, mean_logprob=0.0) for turn in range(num_turns))
    return MemberOutcome(sample_id=str(number), rewards=rewards, end="ready", summary=SampleSummary(turns=turns))


def group_of(members: Sequence[MemberOutcome]) -> GroupContext:
    return GroupContext(group="g", task="t", members=tuple(members))


def figures(played: Sequence[Played]) -> Figures:
    return Figures(
        success=fmean(episode.is_right for episode in played),
        turns=fmean(len(episode.turns) for episode in played),
        repeated=fmean(episode.repeated for episode in played),
    )


@pytest.mark.row("S098")
@pytest.mark.parametrize("seed", SEEDS)
async def test_raw_rewards_of_steps_teach_to_repeat_a_right_step_and_bounded_ones_do_not(seed: int) -> None:
    raw, bounded = await trained_by_steps("raw", seed), await trained_by_steps("clip_delta", seed)
    assert raw.turns > 5
    assert raw.repeated > 0.3
    assert bounded.turns < 3.5
    assert bounded.repeated < 0.1
    assert bounded.success > 0.9


# Rewards of turns behind a gate ---------------------------------------------------------------------------------------


def play_sums(logits: Logits, rng: np.random.Generator) -> Played:
    """Answer a question, or call the calculator first. The state is the number of calls so far, and the choices are a
    call and three answers, of which the first is the right one."""
    turns, choices = list[str](), list[tuple[int, int]]()
    p = softmax(logits)
    while len(turns) < TURNS_MAX and (not turns or turns[-1] == "call"):
        choice = int(rng.choice(4, p=p[len(turns)]))
        choices.append((len(turns), choice))
        turns.append("call" if choice == 0 else str(choice - 1))
    return Played(tuple(turns), tuple(choices), is_right=turns[-1] == "0")


async def trained_by_outcome_and_calls(
    accumulate: Accumulate, seed: int, *, weight: float = 1.0, updates: int = 300, lr: float = 0.5
) -> Figures:
    """Train on questions of reasoning-gym with its verifier, and `weight` times its reward for each call, by `g_ra`."""
    from benchmarks.methods.gym import chain_sum

    options = {"gate": "correct", "threshold": 1.0, "accumulate": accumulate}
    estimator = make_estimator(Extension("g_ra", options), {"correct": 1.0, "called": weight})
    rng, logits, questions = np.random.default_rng(seed), np.zeros((TURNS_MAX, 4)), chain_sum(1)

    def verified(number: int, episode: Played) -> float:
        """Return the score of the answer: the right one, or a neighbor of it. An episode without an answer has 0."""
        entry = questions[number]
        last = episode.turns[-1]
        return (
            0.0
            if last == "call"
            else float(questions.score_answer(str(int(entry["answer"]) + int(last)), entry) >= 1.0)
        )

    for _ in range(updates):
        number = int(rng.integers(100_000))
        played = [play_sums(logits, rng) for _ in range(GROUP_SIZE)]
        members = []
        for sample, episode in enumerate(played):
            calls = [
                Reward(name="called", value=1.0, segment=1 + 2 * turn)
                for turn, text in enumerate(episode.turns)
                if text == "call"
            ]
            whole = Reward(name="correct", value=verified(number, episode))
            members.append(member(sample, (whole, *calls), len(episode.turns)))
        advantages = estimator.of_group(group_of(members))
        climb(
            logits,
            played,
            [[advantages[str(sample)]] * len(episode.turns) for sample, episode in enumerate(played)],
            lr,
        )
    return figures([play_sums(logits, rng) for _ in range(EVAL_EPISODES)])


@pytest.mark.row("S097")
async def test_without_a_gate_rewards_of_calls_take_the_place_of_the_outcome() -> None:
    """A call is worth as much as the right answer: six calls are worth as much as five and the right answer. Two of
    three seeds without a gate lose the outcome."""
    pytest.importorskip("reasoning_gym")
    gated, direct = [
        [await trained_by_outcome_and_calls(accumulate, seed) for seed in SEEDS] for accumulate in get_args(Accumulate)
    ]
    assert min(one.success for one in gated) > 0.85
    assert max(one.turns for one in gated) < 4
    assert min(one.turns for one in direct) > 5.5
    assert fmean(one.success for one in gated) > fmean(one.success for one in direct) + 0.4


# Prices ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Routed:
    """Means of a trained router."""

    success: float
    price: float


PRICES = np.array([0.0, 0.001, 0.01])
"""Price of a question: no model, a cheap one, a dear one."""
SUCCESS = np.array([[0.8, 0.85, 0.9], [0.1, 0.4, 0.9]])
"""Probability of a right answer: [kind of question, model]."""


async def trained_router(cost_weight: float, seed: int, *, updates: int = 150, lr: float = 0.5) -> Routed:
    """Train a choice of the model for each kind of question with the scorer `routing`, by `grpo`."""
    scorer = RoutingScorer(options=RoutingOptions(cost_weight=cost_weight, price_max=0.01))
    rewards = []
    for price in PRICES.tolist():
        for value in (0.0, 1.0):
            known = {"correct": (Reward(name="correct", value=value),)}
            uses = (EndpointUse(endpoint="model", price=price),)
            scored = await scorer.score(replace(item_of([RIGHT]), rewards=known, endpoints=uses))
            rewards.append((replace(scored, name="routed"),))
    estimator, rng, logits = make_estimator("grpo"), np.random.default_rng(seed), np.zeros(SUCCESS.shape)
    for _ in range(updates):
        for kind in range(len(SUCCESS)):
            asked = rng.choice(len(PRICES), size=GROUP_SIZE, p=softmax(logits[kind])).tolist()
            right = (rng.random(GROUP_SIZE) < SUCCESS[kind, asked]).tolist()
            played = [
                Played(("",), ((kind, choice),), is_right=is_right)
                for choice, is_right in zip(asked, right, strict=True)
            ]
            members = [
                member(number, rewards[2 * one.choices[0][1] + one.is_right], 1) for number, one in enumerate(played)
            ]
            advantages = estimator.of_group(group_of(members))
            climb(logits, played, [[advantages[str(number)]] for number in range(GROUP_SIZE)], lr)
    chosen = softmax(logits)
    return Routed(success=float((chosen * SUCCESS).sum(1).mean()), price=float((chosen @ PRICES).mean()))


@pytest.mark.row("S093")
@pytest.mark.parametrize("seed", SEEDS)
async def test_a_larger_weight_of_the_cost_lowers_the_mean_price_of_a_router_that_is_trained_from_samples(
    seed: int,
) -> None:
    found = [await trained_router(cost_weight, seed) for cost_weight in (0.0, 0.5, 0.9)]
    prices = [one.price for one in found]
    assert prices == sorted(prices, reverse=True)
    assert prices[0] > 3 * prices[-1]
    assert found[0].success > found[-1].success, "the price is paid for right answers"


Train = Callable[[int], Coroutine[Any, Any, Figures | Routed]]


def report(method: tuple[str, Train], baseline: tuple[str, Train]) -> None:
    """Print the measures of both sides by seed, and their mean difference with its standard error over the seeds."""
    sides = [(name, [asyncio.run(train(seed)) for seed in SEEDS]) for name, train in (method, baseline)]
    for measure in Figures.__slots__ if isinstance(sides[0][1][0], Figures) else Routed.__slots__:
        values = [[float(getattr(one, measure)) for one in found] for _, found in sides]
        for (name, _), of_seeds in zip(sides, values, strict=True):
            print(f"{name:16} {measure:9}", " ".join(f"{value:.4f}" for value in of_seeds))
        differences = [one - other for one, other in zip(*values, strict=True)]
        print(f"{'difference':16} {measure:9} {fmean(differences):+.4f} ± {stdev(differences) / len(SEEDS) ** 0.5:.4f}")


if __name__ == "__main__":
    report(("try_again", partial(trained_by_attempts, "attempts")), ("plain", partial(trained_by_attempts, "correct")))
    report(("clip_delta", partial(trained_by_steps, "clip_delta")), ("raw", partial(trained_by_steps, "raw")))
    for worth in (0.5, 1.0):
        train = partial(trained_by_outcome_and_calls, weight=worth)
        report((f"gated {worth}", partial(train, "gated")), (f"direct {worth}", partial(train, "direct")))
    for cost_weight in (0.5, 0.9):
        train_router = partial(trained_router, cost_weight)
        report((f"cost_weight {cost_weight}", train_router), ("cost_weight 0", partial(trained_router, 0.0)))
