"""One candidate of the tables of verdicts, and how it is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """A candidate's file, the hidden test for it, and the verdict that a person assigned to it."""

    name: str
    verdict: str
    source: str
    manifest: Mapping[str, Any]
    evasion: bool = False
    """Whether it tries to be accepted without the right answer."""
    plain: bool = True
    """Whether plain Python can run it, too; for programs in Python."""
    message: str = ""
    """Text that the message of the verdict must contain."""
    secret: str = ""
    """Text that the message must not contain."""


def require_different_names(cases: tuple[Case, ...]) -> None:
    """Raise AssertionError if two cases have equal names."""
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), sorted(name for name in names if names.count(name) > 1)
