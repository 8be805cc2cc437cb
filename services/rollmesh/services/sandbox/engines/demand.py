"""Compute how many ready sessions of a profile are worth keeping, from the times of its opens. Arithmetic only.

Opens drain a pool while one creator refills it, one session per `make_s`. The backlog is the number of sessions that
opens have taken and the creator has not yet replaced. A pool as large as the highest backlog would have served every
open. This peak decays over time. If several sessions are created at a time, this keeps a few more than needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

_MAKE_S = 0.01
"""Seconds to create a session, until one was measured."""
_LATEST = 0.2
"""Weight of the latest creation time in the moving average."""


class Demand:
    """Demand for one profile. Times are monotonic seconds of a clock."""

    def __init__(self, halflife_s: float) -> None:
        self._halflife_s = halflife_s
        self._make_s = _MAKE_S
        self._backlog = 0.0
        self._peak = 0.0
        self._at_s = 0.0

    def opened(self, now_s: float) -> None:
        """Record that a session was requested."""
        passed_s = now_s - self._at_s
        self._peak = self._faded(now_s)
        self._backlog = max(0.0, self._backlog - passed_s / self._make_s) + 1
        self._peak = max(self._peak, self._backlog)
        self._at_s = now_s

    def made(self, took_s: float) -> None:
        """Record the time that the creation of a ready session took, in seconds."""
        self._make_s += _LATEST * (took_s - self._make_s)

    def wanted(self, now_s: float) -> int:
        """Return the number of sessions that should be ready; 0 one half-life after a single open."""
        return round(self._faded(now_s))

    def _faded(self, now_s: float) -> float:
        return self._peak * math.exp2((self._at_s - now_s) / self._halflife_s)


def shares(wanted: Mapping[str, int], most: int) -> dict[str, int]:
    """Distribute at most `most` sessions over the profiles. Profiles that want the most are reduced first."""
    given = dict(wanted)
    for _ in range(sum(given.values()) - most):
        given[max(given, key=given.__getitem__)] -= 1
    return given
