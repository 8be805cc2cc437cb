"""A process that matches answers against regular expressions (`worker_loop`).

The key of a request is `{"patterns": [...], "whole": bool, "ignore_case": bool}`, the reply `{"equal": bool}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rollmesh.services.reward.worker_loop import serve

_KEYS_MAX = 256
"""Keys that a worker remembers."""


@dataclass(frozen=True, slots=True)
class Patterns:
    """The accepted patterns of a task."""

    patterns: tuple[re.Pattern[str], ...]
    whole: bool
    error: str = ""
    """Why no answer can be matched, or empty."""
    cpu_s: float = 0.0


class Matcher:
    """Matches a text against the patterns of a task; `.` matches newlines."""

    def __init__(self) -> None:
        self._compiled = lru_cache(maxsize=_KEYS_MAX)(_compiled)

    def read(self, request: Mapping[str, Any]) -> Patterns:
        return self._compiled(tuple(request["patterns"]), request["whole"], request["ignore_case"])

    def reply(self, key: Patterns, text: str) -> dict[str, Any]:
        if key.error:
            return {"error": key.error}
        try:
            found = any((p.fullmatch(text) if key.whole else p.search(text)) is not None for p in key.patterns)
        except MemoryError:  # the model chose the text
            found = False
        return {"equal": found}


def _compiled(patterns: tuple[str, ...], whole: bool, ignore_case: bool) -> Patterns:
    flags = re.DOTALL | (re.IGNORECASE if ignore_case else re.NOFLAG)
    try:
        return Patterns(tuple(re.compile(pattern, flags) for pattern in patterns), whole)
    except (re.error, RecursionError, OverflowError) as error:
        place = getattr(error, "pos", None)
        where = "" if place is None else f" (position {place})"
        return Patterns((), whole, f"an accepted pattern of the key is not a regular expression{where}")


if __name__ == "__main__":
    serve(Matcher)
