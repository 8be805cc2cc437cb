"""The ready sessions of one profile, and the opens that wait for one. Bookkeeping only: this module creates and ends
nothing.

An open that finds no ready session waits for one that is being created, if there is one without a waiter. The first one
that becomes ready belongs to the longest waiter, and later opens cannot take it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.engines.demand import Demand
from rollmesh.services.sandbox.engines.forks import LiveSession


class ReadyPool:
    """The pool of one profile."""

    def __init__(self, profile: str, limits: Limits, most: int, halflife_s: float) -> None:
        self.profile = profile
        self.limits = limits
        self.most = most
        self.demand = Demand(halflife_s)
        self.ready: deque[LiveSession] = deque()
        """Ready sessions, the oldest first."""
        self.num_making = 0
        self._waiting: deque[asyncio.Future[bool]] = deque()
        """Waiting opens, at most one per session being created. The result of the future says whether the open got a
        session."""
        self._num_reserved = 0
        """Ready sessions that are reserved for opens whose future is done, but which have not resumed yet."""

    @property
    def has_unreserved(self) -> bool:
        """Whether a ready session is not reserved."""
        return len(self.ready) > self._num_reserved

    @property
    def num_free(self) -> int:
        """Number of sessions, ready or being created, that are not reserved."""
        return len(self.ready) - self._num_reserved + self.num_making - len(self._waiting)

    def made(self, live: LiveSession) -> None:
        """Record that a session being created is ready."""
        self.num_making -= 1
        self.ready.append(live)
        while self._waiting:
            if _notify(self._waiting.popleft(), True):
                self._num_reserved += 1
                return

    def not_made(self) -> None:
        """Record that a creation failed. If too few sessions remain, reject the most recent waiter."""
        self.num_making -= 1
        while len(self._waiting) > self.num_making:
            _notify(self._waiting.pop(), False)

    async def next_made(self) -> bool:
        """Wait until a session is ready for the caller, or will not be. Return which. Bounded by the start timeout of a
        session."""
        turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            return await turn
        finally:
            if not turn.cancelled():
                self._num_reserved -= turn.result()
            with contextlib.suppress(ValueError):
                self._waiting.remove(turn)


def _notify(turn: asyncio.Future[bool], got: bool) -> bool:
    """Set the result of a waiting open. Return whether it still waited."""
    if turn.done():
        return False
    turn.set_result(got)
    return True
