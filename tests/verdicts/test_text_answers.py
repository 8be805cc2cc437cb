"""The scorers of text judge answers as a person does."""

from __future__ import annotations

import json

from msgspec.structs import replace

from rollmesh.services.reward.item import AnswerKey
from rollmesh.services.reward.scorer import SCORERS, Scorer
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Outcome, Reward

from ..unit.reward.builders import item
from .text_answers import TEXT_ROWS, TextRow


async def test_values_are_those_of_a_person() -> None:
    scorers: dict[str, Scorer] = {}
    wrong = []
    try:
        for row in TEXT_ROWS:
            of_row = f"{row.scorer} {json.dumps(row.options, sort_keys=True)}"
            if of_row not in scorers:
                scorers[of_row] = SCORERS.make(Extension(row.scorer, dict(row.options)))
            reward = await _scored(scorers[of_row], row)
            if abs(reward.value - row.value) > 1e-9 or reward.outcome is not Outcome.OK:
                wrong.append(f"{of_row}: {row.answer[:60]!r}: {reward.value} {reward.evidence}")
    finally:
        for scorer in scorers.values():
            await scorer.close()
    assert wrong == []


async def _scored(scorer: Scorer, row: TextRow) -> Reward:
    key = AnswerKey(answers=tuple(row.key["answers"]), record=row.key)
    reward = await scorer.score(replace(item(row.answer), answer_key=key))
    assert isinstance(reward, Reward)
    return reward


def test_the_table_is_large_and_has_no_row_twice() -> None:
    rows = [json.dumps(row) for row in TEXT_ROWS]
    assert len(set(rows)) == len(rows) >= 200
