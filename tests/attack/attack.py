"""Data types of attacks: source, expected lines in the jail, expected lines without isolation, and verdict.

Silence never counts as containment. An attack reports each attempt on a line (`probe` in inside.py: the errno or the
result), and every line must match `held`. An attack that is killed and cannot report is identified by its outcome
instead. `free` describes the lines of the same source in a plain process of the host: it proves that the attempt works
and that the check can fail.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal

from rollmesh.services.sandbox.engine import RunOutcome

if TYPE_CHECKING:
    from .arena import Scene


class Verdict(Enum):
    """Required end of an attack."""

    REFUSED = "refused"
    """Every attempt failed with an error, and the code continued."""
    HARMLESS = "harmless"
    """It was allowed and affected no other session."""
    BOUNDED = "bounded"
    """It ended by time, memory or its own error, whichever came first."""
    TIME = "time"
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"
    REJECTED = "rejected"
    """As a candidate it was judged and not accepted."""
    ENDED = "ended"
    """It lost its own session."""


_OUTCOMES = {
    Verdict.REFUSED: {RunOutcome.OK},
    Verdict.HARMLESS: {RunOutcome.OK, RunOutcome.ERROR},
    Verdict.BOUNDED: {RunOutcome.ERROR, RunOutcome.TIME, RunOutcome.MEMORY},
    Verdict.TIME: {RunOutcome.TIME},
    Verdict.MEMORY: {RunOutcome.MEMORY},
    Verdict.PROCESSES: {RunOutcome.PROCESSES},
    Verdict.OUTPUT: {RunOutcome.OUTPUT},
    Verdict.ENDED: {RunOutcome.EXITED},
    Verdict.REJECTED: set(),
}

_WORDS = {
    "{no}": "(EPERM|EACCES|ENOSYS)",
    "{absent}": "(ENOENT|ENOTDIR|EACCES|EPERM)",
    "{readonly}": "(EROFS|EACCES|EPERM)",
    "{cut off}": "(EPERM|EACCES|ENOSYS|ECONNREFUSED|ENETUNREACH|ENOENT|EAFNOSUPPORT)",
    "{gone}": "ESRCH",
}
"""Families of errors, so that a mechanism may be replaced by a better one. EINVAL and EFAULT are never included,
because they come from code behind the mechanism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack in one session. `name` is unique and describes the attempt."""

    name: str
    source: str
    """Python source that can use the names of inside.py and the facts of `World`."""
    verdict: Verdict
    held: Sequence[str] = ()
    """One pattern per line that it prints in the jail, in order. If empty, only the outcome counts."""
    free: Sequence[str] = ()
    """The same for a plain process of root on this host. Empty if it is too dangerous there or there is nothing to
    compare."""
    drive: Callable[[Scene], Awaitable[None]] | None = None
    """Function that uses other commands of the session instead of running `source`, and reports results by
    `scene.say`."""
    wall_s: float = 10.0
    """Time limit of the attack. It is ample unless time is attacked, so that a busy host is not mistaken for a
    breach."""
    alive: bool | None = None
    """Whether the session must be usable or ended afterwards; None if either is allowed."""
    needs: Literal["", "memory cgroup"] = ""
    """A mechanism without which the attack is known to succeed; the table then shows that."""
    profile: str = "python"
    """Profile of the attacker's session; `online` defines the other profiles."""
    quick: bool = False
    """Whether the fast tests run it."""

    def __post_init__(self) -> None:
        if not self.held and self.verdict in (Verdict.REFUSED, Verdict.HARMLESS, Verdict.REJECTED):
            raise ValueError(f"{self.name}: an attack that ends by itself must say what came of it")

    @property
    def outcomes(self) -> set[RunOutcome]:
        """Allowed outcomes of the reply."""
        return _OUTCOMES[self.verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Attacks on one target."""

    name: str
    attacks: Sequence[Attack]


def mismatch(said: str, patterns: Sequence[str]) -> str:
    """Return why the lines do not match `patterns`; empty if they do."""
    lines = said.splitlines()
    for line, pattern in zip(lines, patterns, strict=False):
        if re.fullmatch(expand(pattern), line) is None:
            return f"said {line!r}, not {pattern!r}"
    if len(lines) != len(patterns):
        return f"said {len(lines)} lines, not {len(patterns)}: {said[-300:]!r}"
    return ""


def expand(pattern: str) -> str:
    """Return the regular expression of a pattern."""
    for word, expression in _WORDS.items():
        pattern = pattern.replace(word, expression)
    return pattern
