"""Reward each turn with a tool call by whether the call succeeded, for methods with rewards of turns.

A turn has a call if the model observed the result of a tool after it. Whether the call failed is recorded with the
result; a result that an agent gave as text failed if it matches `error_pattern`. One reward per such turn, for the last
segment of the turn. A sample without a call gets none (NOT_APPLICABLE). The reward is not one of the whole sample, so a
run needs another scorer for that. A model may earn it by calls without use; give it a small weight.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from rollmesh.services.reward.item import TEXT_CHARS_MAX, JudgedSegment, ScoreItem
from rollmesh.services.reward.scorer import Scorer, not_applicable
from rollmesh.services.reward.scorers.extract import compile_pattern
from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.domain.trajectory import Reward, Source


class TurnSuccessOptions(Settings):
    """Settings of the scorer of tool calls."""

    success: float = 1.0
    """Reward of a turn whose call succeeded."""
    failure: float = 0.0
    """Reward of a turn whose call failed or could not be parsed."""
    error_pattern: NonEmptyStr = r"(?m)^error: "
    """Regular expression that the result of a failed call contains, if the agent gave it as text; `.` matches
    newlines."""

    def check_fields(self) -> None:
        compile_pattern("error_pattern", self.error_pattern)


class TurnSuccessScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = TurnSuccessOptions
    version = "2"

    def __init__(self, *, options: TurnSuccessOptions) -> None:
        self._options = options
        self._is_error: re.Pattern[str] = compile_pattern("error_pattern", options.error_pattern)

    async def score(self, item: ScoreItem) -> Reward | Sequence[Reward]:
        rewards = []
        for turn in item.turns:
            results = [segment for segment in turn.observations if segment.source is Source.TOOL]
            if results:
                failed = any(map(self._failed, results))
                value = self._options.failure if failed else self._options.success
                kinds = ", ".join(segment.tool.error for segment in results if segment.tool and segment.tool.error)
                evidence = f"the call failed{kinds and f': {kinds}'}" if failed else "the call succeeded"
                rewards.append(Reward(name="", value=value, segment=turn.segment, evidence=evidence))
        return rewards or not_applicable("the model called no tool")

    def _failed(self, result: JudgedSegment) -> bool:
        if result.tool is not None:
            return not result.tool.ok
        return self._is_error.search(result.text[-TEXT_CHARS_MAX:]) is not None
