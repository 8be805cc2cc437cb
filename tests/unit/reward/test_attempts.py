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
from rollmesh.shared.domain.trajectory import EndpointUse, FinishReason, Outcome, Reward, Role, Source

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


@pytest.mark.parametrize(
    ("values", "value", "outcome"),
    [
        ({"sum": 0.5, "query": None}, 0.5, Outcome.OK),
        ({"sum": None, "query": 0.0}, 0.0, Outcome.OK),
        ({"sum": 1.0, "query": 0.0}, 1.0, Outcome.OK),
        ({"sum": None, "query": None}, 0.0, Outcome.NOT_APPLICABLE),
    ],
)
async def test_the_first_applicable_reward_is_taken(
    values: dict[str, float | None], value: float, outcome: Outcome
) -> None:
    found = await made("first", rewards=["sum", "query"]).score(read(item(), **values))
    assert (found.value, found.outcome) == (value, outcome)


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
