"""Check the form of the text of the model: 1 if the pattern matches, else 0.

Source: the format reward of DeepSeek-R1 (2025-01). It is separate from correctness, because a collapsed
policy still keeps the form, and a sum of both would hide the collapse.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from rollmesh.services.reward.item import ScoreItem, Where
from rollmesh.services.reward.scorer import Scorer
from rollmesh.services.reward.scorers.extract import compile_pattern
from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.domain.trajectory import Reward


class FormatOptions(Settings):
    """Settings of the format scorer."""

    pattern: NonEmptyStr = r"\s*<answer>[^<]+</answer>\s*"
    """Regular expression; `.` matches newlines."""
    where: Where = "final"
    """`final`: the last assistant message; `episode`: all assistant messages, separated by an empty line."""
    whole: bool = True
    """Whether the pattern must match the whole text. Otherwise it may match anywhere in the text."""

    def check_fields(self) -> None:
        compile_pattern("pattern", self.pattern)


class FormatScorer(Scorer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = FormatOptions
    version = "1"

    def __init__(self, *, options: FormatOptions) -> None:
        pattern = compile_pattern("pattern", options.pattern)
        self._match = pattern.fullmatch if options.whole else pattern.search
        self._where = options.where

    async def score(self, item: ScoreItem) -> Reward:
        matches = self._match(item.response(self._where)) is not None
        return Reward(name="", value=float(matches), evidence="matches" if matches else "does not match")
