"""Reward each turn by its own answer: 1 if the answer is accepted, else 0.

For methods that compare the answers of an episode, such as `text_feedback`. The reward is not one of the whole sample,
so a run needs another scorer for that. A sample with the role `critique`, or without a turn, has no answer
(NOT_APPLICABLE).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import Extractor, PatternOptions, shorten
from rollmesh.shared.config.settings import NonEmptyStr
from rollmesh.shared.domain.trajectory import Reward


class TurnAnswerOptions(PatternOptions):
    """Settings of the scorer `turn_answer`."""

    ignored_role: NonEmptyStr = "critique"
    """Role of samples that are not scored."""


class TurnAnswerScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = TurnAnswerOptions
    version = "1"

    def __init__(self, *, options: TurnAnswerOptions) -> None:
        self._options = options
        self._extractor = Extractor(options)

    async def score(self, item: ScoreItem) -> Reward | Sequence[Reward]:
        if item.role == self._options.ignored_role:
            return not_applicable(f"a sample with the role `{item.role}` has no answer")
        if item.answer_key is None or not item.answer_key.answers:
            return not_applicable("the task has no answer key")
        if not item.turns:
            return not_applicable("the sample has no turn")
        rewards = []
        for turn in item.turns:
            answer = self._extractor.find_in(turn.text)
            value = float(answer in item.answer_key.answers)
            rewards.append(Reward(name="", value=value, segment=turn.segment, answer=shorten(answer or "")))
        return rewards
