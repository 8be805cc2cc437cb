"""A custom scorer: 1 if the answer is within a tolerance of the key. A second reward decreases with the number of
tokens."""

from __future__ import annotations

import math
import re
from typing import ClassVar

import msgspec

from rollmesh.services.reward import scorer
from rollmesh.services.reward.item import ScoreItem
from rollmesh.shared.domain.trajectory import Reward

_ANSWER = re.compile(r"<answer>\s*(-?\d+(?:\.\d+)?)\s*</answer>")


class ScorerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings, from the scorer's `options`."""

    tolerance: float = 0.0
    """Largest absolute difference from the key of a correct answer."""


class Scorer(scorer.Scorer):
    """The answer key comes from the task file by `answer_pattern`; it must not appear in the evidence."""

    Options: ClassVar[type[msgspec.Struct]] = ScorerOptions
    version: ClassVar[str] = "1"
    rewards: ClassVar[tuple[str, ...]] = ("brief",)

    def __init__(self, *, options: ScorerOptions) -> None:
        self._tolerance = options.tolerance

    async def score(self, item: ScoreItem) -> list[Reward]:
        assert item.answer_key is not None, "every task of this file has an answer"
        found = _ANSWER.search(item.response())
        right = found is not None and self._near(float(found[1]), float(item.answer_key.answers[0]))
        evidence = f"answered {found[1]}" if found else "no answer"
        return [
            Reward(name="", value=float(right), evidence=evidence),
            Reward(
                name="brief", value=math.exp(-item.num_action_tokens / 100), evidence=f"{item.num_action_tokens} tokens"
            ),
        ]

    def _near(self, answer: float, key: float) -> bool:
        return abs(answer - key) <= self._tolerance
