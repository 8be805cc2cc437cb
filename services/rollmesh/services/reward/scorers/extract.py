"""Find the answer in the text of the model, for scorers that compare it with an answer key."""

from __future__ import annotations

import re

from rollmesh.services.reward.item import TEXT_CHARS_MAX, ScoreItem, Where
from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.trajectory import Reward
from rollmesh.shared.store.records import last_match

ANSWER_END = "</answer>"
ANSWER_TAG = f"<answer>(.*?){ANSWER_END}"
EVIDENCE_CHARS_MAX = 200


class PatternOptions(Settings):
    """Location of the answer in a text of the model."""

    pattern: str = ANSWER_TAG
    """Regular expression of the answer. The last match counts, and its group 1 if the expression has one. `.` matches
    newlines. Empty means the whole text."""

    def check_fields(self) -> None:
        compile_pattern("pattern", self.pattern)


class AnswerOptions(PatternOptions):
    """Location of the answer in the messages of the model."""

    where: Where = "final"
    """`final`: the last assistant message; `episode`: all assistant messages."""


def compile_pattern(field: str, pattern: str) -> re.Pattern[str]:
    """Compile `pattern` so that `.` matches newlines. Raise ValueError that names the field."""
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"`{field}` must be a regular expression, got {pattern!r}: {error}") from None


class Extractor:
    """Finds answers by `AnswerOptions`, or by `PatternOptions` in the final message."""

    def __init__(self, options: PatternOptions) -> None:
        self._pattern = compile_pattern("pattern", options.pattern) if options.pattern else None
        self._where: Where = options.where if isinstance(options, AnswerOptions) else "final"

    def find(self, item: ScoreItem) -> str | None:
        """Return the answer without surrounding space, or None if the pattern does not match."""
        return self.find_in(item.response(self._where))

    def find_in(self, text: str) -> str | None:
        """Return the same of a text of the model, of which the last TEXT_CHARS_MAX characters count."""
        text = text[-TEXT_CHARS_MAX:]
        if self._pattern is not None and self._pattern.pattern == ANSWER_TAG:
            text = text[
                : text.rfind(ANSWER_END) + len(ANSWER_END)
            ]  # without it every unclosed tag is searched to the end
        found = text if self._pattern is None else last_match(self._pattern, text)
        return None if found is None else found.strip()


def verdict(correct: bool, found: str | None) -> Reward:
    """Return 1 or 0 with the answer of the model, also as evidence. The evidence never contains the key."""
    evidence = "no answer found" if found is None else f"answer {shorten(found)!r}"
    return Reward(name="", value=float(correct), evidence=evidence, answer=shorten(found or ""))


def shorten(text: str) -> str:
    return text if len(text) <= EVIDENCE_CHARS_MAX else text[:EVIDENCE_CHARS_MAX] + "..."
