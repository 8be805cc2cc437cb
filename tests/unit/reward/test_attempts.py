"""Scorers that read other rewards: attempts after feedback, the outcome of an episode, and the price of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.services.reward.item import JudgedSegment, ScoreItem
from rollmesh.services.reward.scorer import SCORERS, BatchScorer
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    EndpointUse,
    FinishReason,
    FloatArray,
    GroupContext,
    MemberOutcome,
    Outcome,
    Reward,
    Role,
    Source,
)
from rollmesh.trainer.estimators import make_estimator

from .builders import item


def made(name: str, **options: Any) -> Any:
    return SCORERS.make(Extension(name, options))


def read(scored: ScoreItem, **values: float | None) -> ScoreItem:
    """Return the item with rewards of other scorers; None is one that is not applicable."""
    rewards = {
        name: (Reward(name=name, value=value or 0.0, outcome=Outcome.NOT_APPLICABLE if value is None else Outcome.OK),)
        for name, value in values.items()
    }
    return replace(scored, rewards=rewards)


def attempts(*answers: str) -> ScoreItem:
    """Return an item with a turn for each answer."""
    path: list[JudgedSegment] = []
    for answer in answers:
        for role, source, text in (
            (Role.ACTION, Source.POLICY, f"<answer>{answer}</answer>" if answer else "no idea"),
            (Role.OBSERVATION, Source.TOOL, "Incorrect."),
        ):
            path.append(
                JudgedSegment(
                    index=len(path),
                    role=role,
                    source=source,
                    token_ids=np.zeros(1, np.int32),
                    text=text,
                    finish=FinishReason.STOP,
                )
            )
    return replace(item(), path=tuple(path[:-1]), leaf=path[-2].index)


@pytest.mark.row("S070")
@pytest.mark.parametrize(
    ("answers", "correct", "reward"),
    [
        (["4"], 1.0, 1.0),
        (["1", "4"], 1.0, 0.5),
        (["1", "2", "4"], 1.0, 0.25),
        (["1", "1", "4"], 1.0, 0.25 - 0.5 / 3),
        (["1", " 1 ", "1"], 0.0, -0.5 * 2 / 3),
        (["1", "2", "3"], 0.0, 0.0),
        (["X y", "x Y"], 0.0, -0.25),
        (["1", "", "4"], 1.0, 0.5),
        ([""], 0.0, 0.0),
    ],
)
async def test_early_success_and_different_answers_are_worth_more(
    answers: list[str], correct: float, reward: float
) -> None:
    """By hand: 0.5^(t - 1) for success at answer t, minus 0.5 (1 - E / T)."""
    found = await made("try_again").score(read(attempts(*answers), correct=correct))
    assert found.value == pytest.approx(reward)


@pytest.mark.row("S070")
async def test_equal_answers_score_lower_than_different_ones_and_late_success_lower_than_early() -> None:
    async def score(*answers: str, correct: float) -> float:
        return cast(Reward, await made("try_again").score(read(attempts(*answers), correct=correct))).value

    assert await score("1", "1", "1", correct=0.0) < await score("1", "2", "3", correct=0.0)
    assert await score("4", correct=1.0) > await score("1", "2", "4", correct=1.0)


async def test_attempts_without_a_verdict_are_not_scored() -> None:
    found = await made("try_again").score(read(attempts("1"), correct=None))
    assert found.outcome is Outcome.NOT_APPLICABLE


@pytest.mark.parametrize(("value", "outcome"), [(0.5, Outcome.OK), (None, Outcome.NOT_APPLICABLE)])
async def test_all_samples_of_an_episode_have_the_reward_of_the_last(value: float | None, outcome: Outcome) -> None:
    scorer: BatchScorer = made("outcome", reward="correct")
    items = [read(replace(item("x"), sample_id=f"e.{n}"), correct=0.0) for n in range(2)]
    found: Sequence[Any] = await scorer.score_batch([*items, read(item("y"), correct=value)])
    assert [(reward.value, reward.outcome) for reward in found] == [(value or 0.0, outcome)] * 3


@pytest.mark.row("S093")
@pytest.mark.parametrize(
    ("correct", "form", "price", "cost_weight", "reward"),
    [
        (1.0, 1.0, 0.0, 0.5, 1.0),
        (1.0, 1.0, 0.25, 0.5, 0.5 + 0.5 * 0.5),
        (0.5, 1.0, 0.25, 0.2, 0.8 * 0.5 + 0.2 * 0.5),
        (1.0, 1.0, 4.0, 0.5, 0.5),
        (0.0, 1.0, 0.0, 0.5, 0.0),
        (1.0, 0.0, 0.0, 0.5, -1.0),
        (0.0, 0.0, 0.0, 1.0, -1.0),
        (1.0, 1.0, 0.25, 0.0, 1.0),
    ],
)
async def test_a_low_price_is_rewarded_only_for_a_right_answer_in_the_right_format(
    correct: float, form: float, price: float, cost_weight: float, reward: float
) -> None:
    """By hand, with price_max 1: C = 1 - sqrt(price)."""
    uses = (EndpointUse(endpoint="a", price=price / 2), EndpointUse(endpoint="b", price=price / 2))
    scored = replace(read(item("x"), correct=correct, format=form), endpoints=uses)
    found = await made("routing", format="format", cost_weight=cost_weight, price_max=1.0).score(scored)
    assert found.value == pytest.approx(reward)


@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_a_router_that_is_trained_from_samples_pays_less_with_a_larger_weight_of_the_cost(seed: int) -> None:
    """By reinforcement learning with this scorer and the estimator `grpo`, from groups of eight samples."""
    found = [await trained_router(cost_weight, seed) for cost_weight in (0.0, 0.5, 0.9)]
    prices = [price for price, _ in found]
    assert prices == sorted(prices, reverse=True)
    assert prices[0] > 3 * prices[-1]
    assert found[0][1] > found[-1][1], "and it is right less often"


async def trained_router(cost_weight: float, seed: int, *, updates: int = 150, lr: float = 0.5) -> tuple[float, float]:
    """Return the mean price and success of a table over two kinds of questions and three models."""
    price = np.array([0.0, 0.001, 0.01])
    success = np.array([[0.8, 0.85, 0.9], [0.1, 0.4, 0.9]])
    scorer = made("routing", cost_weight=cost_weight, price_max=0.01)
    values = np.array(
        [
            [
                (
                    await scorer.score(
                        replace(
                            read(item("x"), correct=float(right)), endpoints=(EndpointUse(endpoint="m", price=paid),)
                        )
                    )
                ).value
                for right in (0, 1)
            ]
            for paid in price.tolist()
        ]
    )
    rng, grpo, logits = np.random.default_rng(seed), make_estimator("grpo"), np.zeros(success.shape)
    for _ in range(updates):
        for kind, row in enumerate(logits):
            p = softmax(row)
            asked = rng.choice(len(price), size=8, p=p)
            right = (rng.random(8) < success[kind, asked]).astype(int)
            rewards = [(Reward(name="routed", value=value),) for value in values[asked, right].tolist()]
            members = [MemberOutcome(sample_id=str(n), rewards=one, end="ready") for n, one in enumerate(rewards)]
            advantages = grpo.of_group(GroupContext(group="g", task="t", members=tuple(members)))
            for number, one in enumerate(asked.tolist()):
                row += lr / 8 * advantages[str(number)] * (np.eye(len(price))[one] - p)
    chosen = np.array([softmax(row) for row in logits])
    return float((chosen @ price).mean()), float((chosen * success).sum(1).mean())


def softmax(logits: FloatArray) -> FloatArray:
    odds = np.exp(logits - logits.max())
    return odds / odds.sum()


async def test_control_rewards_say_nothing_true() -> None:
    """Random rewards do not depend on the answer, and are those of a coin: 1,000 samples are within four deviations."""
    scorer = made("control", form="random", share=0.25)
    values = [await scorer.score(replace(item(text), sample_id=f"s{n}")) for n in range(1000) for text in ("right",)]
    assert values == [await scorer.score(replace(item("wrong"), sample_id=f"s{n}")) for n in range(1000)]
    assert abs(sum(values) / 1000 - 0.25) < 4 * (0.25 * 0.75 / 1000) ** 0.5
    inverted = made("control", form="inverted")
    assert [await inverted.score(read(item("x"), correct=value)) for value in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]
    assert (await inverted.score(read(item("x"), correct=None))).outcome is Outcome.NOT_APPLICABLE
    assert await made("control", form="constant", value=0.5).score(item("x")) == 0.5
