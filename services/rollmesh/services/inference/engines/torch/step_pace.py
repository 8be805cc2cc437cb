"""Decide how long the next step of the torch engine waits for further requests.

A step has a cost that does not depend on its number of rows, so few rows per step are expensive per token. While few
sequences are live and others are expected soon, the next step therefore waits for `hold_s`, less the CPU time of the
step before. In this time requests arrive, and the next step admits them together: one prefill for all of them, and one
decode with more rows. A step that computes for longer than `hold_s` is never followed by a hold, so large models and
large batches run without one.

A step is not held when holding cannot add rows:
- `ROWS_FULL` rows are live, or as many as there are slots;
- fewer than `ARRIVALS_MIN` requests are expected within `hold_s`, by the rate of the last `RATE_S` seconds;
- half of the sessions of the last `SESSIONS_S` seconds or more have a live request, so that waiting could not double
  the rows. A session waits for its answer, so a single client, or any number of them that mostly wait for the model,
  runs without a hold. Requests without a session count as one session.

Changes only when steps run. The tokens of a request do not depend on it. Time is passed in, and the class has no
thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict

ROWS_FULL = 64
"""Number of live sequences from which a step is not held: more rows lower the cost per token by little."""
ARRIVALS_MIN = 0.1
"""Smallest expected number of arrivals within a hold. A request that joins stays for many steps, so a small chance is
worth it."""
RATE_S = 0.1
"""Time constant of the rate of arrivals, in seconds."""
SESSIONS_S = 0.5
"""Time since its last request for which a session may send another one soon, in seconds."""
SESSIONS_MAX = 4096
"""Most sessions that are stored; the least recent is dropped first."""


class StepPace:
    """When the next step starts. Used by the compute thread alone; all times are seconds of one monotonic clock."""

    def __init__(self, hold_s: float, slots_max: int) -> None:
        """`hold_s` is the longest hold of one step, in seconds; 0 turns holding off."""
        self._hold_s = hold_s
        self._rows_full = min(ROWS_FULL, slots_max)
        self._arrivals = 0.0
        """Number of arrivals, each weighted by exp(-age / RATE_S)."""
        self._arrived_s = self._due_s = -math.inf
        self._sessions: OrderedDict[str, float] = OrderedDict()
        """Time of the last request by session, oldest first."""
        self.held_s = 0.0
        """Total time of the holds so far, in seconds."""

    def arrived(self, session: str, now_s: float) -> None:
        """Record a request."""
        self._arrivals = self._weighted(now_s) + 1.0
        self._arrived_s = now_s
        self._sessions[session] = now_s
        self._sessions.move_to_end(session)
        if len(self._sessions) > SESSIONS_MAX:
            self._sessions.popitem(last=False)

    def finished(self, now_s: float, cpu_s: float) -> None:
        """Record the end of a step that used `cpu_s` seconds of CPU. Time without a core is not deducted from the
        hold."""
        self._due_s = now_s + self._hold_s - cpu_s

    def wait_s(self, num_live: int, now_s: float) -> float:
        """Return how long a step with `num_live` sequences waits for further ones, in seconds; 0 to start it now."""
        left_s = self._due_s - now_s
        if left_s <= 0 or num_live >= self.rows_wanted(now_s):
            return 0.0
        if self._weighted(now_s) * self._hold_s / RATE_S < ARRIVALS_MIN:
            return 0.0
        return left_s

    def rows_wanted(self, now_s: float) -> int:
        """Return the number of live sequences from which waiting for more is useless."""
        while self._sessions and next(iter(self._sessions.values())) < now_s - SESSIONS_S:
            self._sessions.popitem(last=False)
        return min(self._rows_full, len(self._sessions) // 2)

    def _weighted(self, now_s: float) -> float:
        return self._arrivals * math.exp((self._arrived_s - now_s) / RATE_S) if self._arrivals else 0.0
