"""How many ready sessions of a profile are worth keeping, from when it was opened. Arithmetic only.

Opens drain a pool while one maker refills it, a session per `make_s`. What the opens have taken that the maker has not yet brought back is
the backlog; a pool as large as the highest backlog would have served every one of them. That height is remembered and fades. Where several are
made at a time this keeps a few more than needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_MAKE_S = 0.01
"""Until one was made."""
_LATEST = 0.2
"""Weight of the latest making time in their average."""


class Demand:
    """Of one profile. Times are a clock's monotonic seconds."""

    def __init__(self, halflife_s: float) -> None:
        self._halflife_s = halflife_s
        self._make_s = _MAKE_S
        self._backlog = 0.0
        self._peak = 0.0
        self._at_s = 0.0

    def opened(self, now_s: float) -> None:
        """A session was asked for."""
        passed_s = now_s - self._at_s
        self._peak = self._faded(now_s)
        self._backlog = max(0.0, self._backlog - passed_s / self._make_s) + 1
        self._peak = max(self._peak, self._backlog)
        self._at_s = now_s

    def made(self, took_s: float) -> None:
        """A ready session took so long to make."""
        self._make_s += _LATEST * (took_s - self._make_s)

    def wanted(self, now_s: float) -> int:
        """Sessions that should be ready; 0 a half-life after a lone open."""
        return round(self._faded(now_s))

    def _faded(self, now_s: float) -> float:
        return self._peak * math.exp2((self._at_s - now_s) / self._halflife_s)


def shares(wanted: Mapping[str, int], most: int) -> dict[str, int]:
    """What each gets where all together get at most `most`: those who want most give first."""
    given = dict(wanted)
    for _ in range(sum(given.values()) - most):
        given[max(given, key=given.__getitem__)] -= 1
    return given
