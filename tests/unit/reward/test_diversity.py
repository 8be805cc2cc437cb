"""The scorer of diversity: signals by hand, and the check of MultiRole-R1."""

from __future__ import annotations

from math import log
from typing import Any, cast

import pytest
from msgspec.structs import replace

from rollmesh.services.reward.config import RewardConfig, ScorerConfig, build_engine
from rollmesh.services.reward.scorer import SCORERS
from rollmesh.services.reward.scorers.diversity import FUNCTION_WORDS, signals_of
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Reward

from .builders import item

ALL = ("lexical", "entropy", "length", "pattern", "adjacent", "yule", "bigrams", "function")
VIEW = "A student saves time with online courses, because they need no travel. So the student prefers them."
PARAPHRASE = "With online courses a student saves time, because they need no travel. So the student prefers them."
PERSPECTIVE = (
    "But what does a teacher lose? Faces in the room show who is lost! Screens hide this, and attention drifts away."
)


async def diversity(text: str, **options: Any) -> float:
    scorer = SCORERS.make(Extension("diversity", options))
    return cast(Reward, await scorer.score(item(text))).value


@pytest.mark.row("S103")
async def test_a_new_perspective_is_more_diverse_than_a_paraphrase() -> None:
    paraphrased, added = f"{VIEW} {PARAPHRASE}", f"{VIEW} {PERSPECTIVE}"
    assert await diversity(added) > await diversity(paraphrased) + 0.1
    for signal in ALL[:1] + ALL[3:7]:
        assert await diversity(added, signals=[signal]) > await diversity(paraphrased, signals=[signal]), signal


def test_signals_equal_the_values_by_hand() -> None:
    """Three sentences: "the cat sat", "the cat ran", "why"; seven words of five kinds, counts 2, 2, 1, 1, 1."""
    found = signals_of("The cat sat. The cat ran! Why?", ALL)  # type: ignore[arg-type]
    entropy = -(2 * 2 / 7 * log(2 / 7) + 3 / 7 * log(1 / 7))
    mean, spread = 7 / 3, (2 * (2 / 3) ** 2 + (4 / 3) ** 2) / 3
    function = -(2 / 3 * log(2 / 3) + 1 / 3 * log(1 / 3))
    assert found == pytest.approx(
        {
            "lexical": 5 / 7,
            "entropy": entropy / log(5),
            "length": spread**0.5 / mean,
            "pattern": 1.0,
            "adjacent": (1 - 2 / 4 + 1) / 2,
            "yule": 1 / (1 + 100 * (4 + 4 + 3 - 7) / 49),
            "bigrams": 5 / 6,
            "function": function / log(len(FUNCTION_WORDS)),
        }
    )


@pytest.mark.parametrize("text", ["", "...", "word", "no end of a sentence"])
async def test_short_texts_have_signals_in_their_range(text: str) -> None:
    assert all(0 <= value <= 1 for value in signals_of(text, ALL).values())  # type: ignore[arg-type]
    assert 0 <= await diversity(text) <= 1


@pytest.mark.row("S103")
async def test_diversity_can_be_disabled_for_the_tasks_of_a_domain() -> None:
    config = RewardConfig(
        scorers=(ScorerConfig(name="exact", reward="correct"), ScorerConfig(name="diversity", reward="diverse")),
        weights={"correct": 0.9, "diverse": 0.1},
    )
    engine = build_engine(config)
    subjective = item("<answer>42</answer>")
    names = [
        {reward.name for reward in rewards}
        for rewards in await engine.score([subjective, replace(subjective, scorers=("correct",))])
    ]
    await engine.close()
    assert names == [{"correct", "diverse"}, {"correct"}]
