"""Reward early success over several attempts, and answers that differ (UFO, arXiv:2507.14295; code:
lichengliu03/unary-feedback, `ragen/env/metamathqa/env.py`).

    R = discount^(t - 1) [the last answer is right] - repetition (1 - E / T)

T answers, E different ones, and t = T for the last answer. Answers are compared without case and space. Turns without
an answer do not count. If no turn has one, the reward is that of the success alone. The agent `try_again` makes the
attempts. `discount` and `repetition` are those of the authors' code.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import Extractor, PatternOptions
from rollmesh.shared.config.settings import NonEmptyStr, NonNegativeFloat, PositiveFloat
from rollmesh.shared.domain.trajectory import Reward


class TryAgainScorerOptions(PatternOptions):
    """Settings of the scorer `try_again`."""

    reward: NonEmptyStr = "correct"
    """Name of the reward that tells whether the last answer is right."""
    success_min: float = 1.0
    """Value of that reward from which an answer is right."""
    discount: PositiveFloat = 0.5
    """Factor of the reward for each attempt before the right one."""
    repetition: NonNegativeFloat = 0.5
    """Penalty if all answers are equal and many."""


class TryAgainScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = TryAgainScorerOptions
    version = "1"

    def __init__(self, *, options: TryAgainScorerOptions) -> None:
        self._options = options
        self._extractor = Extractor(options)
        self.reads = (options.reward,)

    async def score(self, item: ScoreItem) -> Reward:
        options = self._options
        last = item.reward(options.reward)
        if last is None:
            return not_applicable(f"the reward {options.reward} is not applicable")
        found = [
            "".join(answer.lower().split())
            for turn in item.turns
            if (answer := self._extractor.find_in(turn.text)) is not None
        ]
        answers = [answer for answer in found if answer]
        success = options.discount ** max(len(answers) - 1, 0) if last >= options.success_min else 0.0
        num, distinct = len(answers), len(set(answers))
        penalty = options.repetition * (1 - distinct / num) if num else 0.0
        return Reward(name="", value=success - penalty, evidence=f"{num} answers, {distinct} different")
