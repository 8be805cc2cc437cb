"""What an attack is: data. Its source, what it must say when it is held, what it says where nothing holds it, and its verdict.

No attack counts as contained because it was silent. It reports each of its attempts on a line (`probe` in inside.py: the errno or
what it got) and every line must match `held`; an attack that can't speak because it is killed is known by the outcome instead.
`free` is what the same source says in a plain process of the host: it proves that the attempt works and the check can fail.
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
    """How an attack must end."""

    REFUSED = "refused"
    """Every attempt got an error and the code went on."""
    HARMLESS = "harmless"
    """It was let do as it liked, and that reached nobody else."""
    BOUNDED = "bounded"
    """By time, memory or its own failure, whichever came first."""
    TIME = "time"
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"
    REJECTED = "rejected"
    """As a candidate it was judged, and not accepted."""
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
    "{nobody}": "ESRCH",
}
"""Families of errors, so that a wall may be replaced by a better one. Never EINVAL or EFAULT: those come from beyond the wall."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One attack in one session. `name` is unique and says what is attempted."""

    name: str
    source: str
    """Python; finds the names of inside.py and the facts of `World`."""
    verdict: Verdict
    held: Sequence[str] = ()
    """A pattern per line that it prints in the jail, in order. Empty: the outcome alone tells."""
    free: Sequence[str] = ()
    """The same for a plain process of root on this host. Empty: too dangerous there, or there is nothing to compare."""
    drive: Callable[[Scene], Awaitable[None]] | None = None
    """Instead of running `source` once: uses the session's other verbs, and says what came of it by `scene.say`."""
    wall_s: float = 10.0
    """Time given to it. Ample where time is not what is attacked, so that a busy host is not mistaken for a breach."""
    alive: bool | None = None
    """Whether the session must be usable, or ended, afterwards; None where either will do."""
    needs: Literal["", "memory cgroup"] = ""
    """A mechanism without which it is known not to be held; the table then says so."""
    profile: str = "python"
    """That of the attacker's session; others than the first are those of `online`."""
    quick: bool = False
    """Whether it is one of those that the fast tests run."""

    def __post_init__(self) -> None:
        if not self.held and self.verdict in (Verdict.REFUSED, Verdict.HARMLESS, Verdict.REJECTED):
            raise ValueError(f"{self.name}: an attack that ends by itself must say what came of it")

    @property
    def outcomes(self) -> set[RunOutcome]:
        """What the reply may be."""
        return _OUTCOMES[self.verdict]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Attacks on one thing."""

    name: str
    attacks: Sequence[Attack]


def mismatch(said: str, patterns: Sequence[str]) -> str:
    """Why the lines are not those of `patterns`; empty if they are."""
    lines = said.splitlines()
    for line, pattern in zip(lines, patterns, strict=False):
        if re.fullmatch(expand(pattern), line) is None:
            return f"said {line!r}, not {pattern!r}"
    if len(lines) != len(patterns):
        return f"said {len(lines)} lines, not {len(patterns)}: {said[-300:]!r}"
    return ""


def expand(pattern: str) -> str:
    """The regular expression of a pattern."""
    for word, expression in _WORDS.items():
        pattern = pattern.replace(word, expression)
    return pattern
