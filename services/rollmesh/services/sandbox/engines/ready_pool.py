"""The ready sessions of one profile, and the opens that wait for one in the making. Bookkeeping only: nothing is made or ended here.

An open that finds none ready waits for one in the making, if there is one that nobody waits for: whichever is ready first belongs to who has waited
longest, and nobody who comes meanwhile can take it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.engines.demand import Demand
from rollmesh.services.sandbox.engines.forks import LiveSession


class ReadyPool:
    """Of one profile."""

    def __init__(self, profile: str, limits: Limits, most: int, halflife_s: float) -> None:
        self.profile = profile
        self.limits = limits
        self.most = most
        self.demand = Demand(halflife_s)
        self.ready: deque[LiveSession] = deque()
        """The oldest first."""
        self.num_making = 0
        self._waiting: deque[asyncio.Future[bool]] = deque()
        """Opens, no more than there are sessions in the making; told whether they have got one."""
        self._num_reserved = 0
        """Of the ready ones, those of opens that were told so and have not come yet."""

    @property
    def has_unreserved(self) -> bool:
        """Whether a ready one is for whoever comes."""
        return len(self.ready) > self._num_reserved

    @property
    def num_free(self) -> int:
        """Ready or in the making for whoever comes."""
        return len(self.ready) - self._num_reserved + self.num_making - len(self._waiting)

    def made(self, live: LiveSession) -> None:
        """One in the making is ready."""
        self.num_making -= 1
        self.ready.append(live)
        while self._waiting:
            if _notify(self._waiting.popleft(), True):
                self._num_reserved += 1
                return

    def not_made(self) -> None:
        """One in the making will not be ready: who came last has waited in vain, if there are not enough others."""
        self.num_making -= 1
        while len(self._waiting) > self.num_making:
            _notify(self._waiting.pop(), False)

    async def next_made(self) -> bool:
        """Wait until one is ready for the caller, or will not be, and say which; bounded by what a session is given to become ready."""
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
    """Whether somebody still waits."""
    if turn.done():
        return False
    turn.set_result(got)
    return True
