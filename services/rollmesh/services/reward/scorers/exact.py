"""Compare the extracted answer with the accepted ones as strings: 1 if one is equal, else 0.

Source: the verifiable reward of DeepSeek-R1 (2025-01) and, before it, exact match in SQuAD (2016).
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import AnswerOptions, Extractor, verdict
from rollmesh.shared.domain.trajectory import Reward


class ExactOptions(AnswerOptions):
    """Settings of the exact scorer."""

    ignore_case: bool = False
    """Whether case is ignored."""
    ignore_chars: str = ""
    """Characters that are removed from both strings first, for example `,$` for amounts."""


class ExactScorer(Scorer):
    """See the module. It does not apply to a task without an answer key."""

    Options: ClassVar[type[msgspec.Struct]] = ExactOptions
    version = "1"

    def __init__(self, *, options: ExactOptions) -> None:
        self._extractor = Extractor(options)
        self._removed = str.maketrans("", "", options.ignore_chars)
        self._ignore_case = options.ignore_case

    async def score(self, item: ScoreItem) -> Reward:
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        found = self._extractor.find(item)
        accepted = {self._normal(answer) for answer in item.answer_key.answers}
        return verdict(found is not None and self._normal(found) in accepted, found)

    def _normal(self, text: str) -> str:
        text = text.translate(self._removed).strip()
        return text.casefold() if self._ignore_case else text
