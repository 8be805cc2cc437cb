"""Match the extracted answer against regular expressions: 1 if one matches, else 0.

The expressions are those of the option `expected`, or the accepted answers of the key. They are the operator's, and the
text is the model's, which may keep an expression such as `(a+)+b` busy without end. The match runs in a worker process,
and an answer that needs more than `compare_s_max` of CPU time is wrong. An empty answer is wrong.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer import not_applicable
from rollmesh.services.reward.scorers.compared import ComparedOptions, ComparedScorer
from rollmesh.services.reward.scorers.extract import compile_pattern, verdict
from rollmesh.shared.domain.trajectory import Reward


class RegexOptions(ComparedOptions):
    """Settings of the scorer of regular expressions. `pattern` finds the answer, and `expected` is what it must
    match."""

    expected: str = ""
    """Regular expression for all tasks; `.` matches newlines. Empty: the accepted answers of the key are the
    expressions."""
    match: Literal["full", "search"] = "full"
    """`full`: the whole answer must match; `search`: a part of it."""
    ignore_case: bool = False
    """Whether case is ignored."""

    def check_fields(self) -> None:
        super().check_fields()
        compile_pattern("expected", self.expected)


class RegexScorer(ComparedScorer):
    """See the module. Without `expected`, it does not apply to a task without an answer key."""

    Options: ClassVar[type[msgspec.Struct]] = RegexOptions
    version = "1"
    worker = "rollmesh.services.reward.regex_worker"
    what = "regex"

    def __init__(self, *, options: RegexOptions) -> None:
        super().__init__(options=options)
        self._options = options

    async def score(self, item: ScoreItem) -> Reward:
        patterns = [self._options.expected] if self._options.expected else list(_answers(item))
        if not patterns:
            return not_applicable("the task has no answer key")
        found = self._extractor.find(item)
        if not found:
            return verdict(False, found)
        whole, ignore_case = self._options.match == "full", self._options.ignore_case
        reply = await self._pool.ask({"patterns": patterns, "whole": whole, "ignore_case": ignore_case}, found)
        return verdict(reply is not None and bool(reply["equal"]), found)


def _answers(item: ScoreItem) -> tuple[str, ...]:
    return item.answer_key.answers if item.answer_key is not None else ()
