"""The math scorer judges answers as a person does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rollmesh.services.reward.scorer import SCORERS
from rollmesh.services.reward.scorers.math import MathScorer
from rollmesh.shared.config.registry import Extension

from ..unit.reward.builders import item
from .math_answers import HARD, ROWS, Row


async def misjudged(rows: Sequence[Row], *, pattern: str = "", compare_s_max: float = 20.0) -> list[str]:
    """Return the rows whose value differs from that of a person."""
    scorer: MathScorer = SCORERS.make(Extension("math", {"pattern": pattern, "compare_s_max": compare_s_max}))
    text = "<answer>{}</answer>" if pattern else "{}"
    try:
        values = [(await scorer.score(item(text.format(row.answer), answer=row.key))).value for row in rows]
    finally:
        await scorer.close()
    return [
        f"{row.key} / {row.answer[:60]}: {value}"
        for row, value in zip(rows, values, strict=True)
        if value != row.accepted
    ]


def test_the_table_is_large_and_has_no_row_twice() -> None:
    pairs = [(row.key, row.answer) for row in ROWS]
    assert len(set(pairs)) == len(pairs) >= 500
    assert sum(row.note.startswith("taste") for row in ROWS) < len(ROWS) // 50


async def test_answers_to_questions_of_mathematics() -> None:
    assert await misjudged(ROWS) == []


@pytest.mark.slow
async def test_answers_between_tags() -> None:
    assert await misjudged(ROWS, pattern="<answer>(.*?)</answer>") == []


@pytest.mark.slow
async def test_expensive_answers_are_wrong_and_never_an_infra_failure() -> None:
    assert await misjudged(HARD, compare_s_max=1.0) == []
