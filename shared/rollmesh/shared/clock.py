"""Time as an argument: the port, the system's clock, and a manual clock for tests and the simulator.

Durations and deadlines come from `monotonic_s` only. `wall_s` is informational. Wall clocks of two machines are
compared for a warning only, see `clock_warning`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

CLOCK_AHEAD_S_MAX = 60.0
"""Difference between the clocks of two hosts, in seconds, beyond which a warning is logged."""


def clock_warning(ahead_s: float, host: str) -> str:
    """Return what is wrong with the clock of a host that is `ahead_s` seconds ahead of the coordinator's, and the
    remedy; empty if nothing."""
    if abs(ahead_s) <= CLOCK_AHEAD_S_MAX:
        return ""
    side = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"the clock of {host} is {abs(ahead_s):.0f} s {side} the coordinator's: certificates can count as expired or "
        "not yet valid, and dates of "
        "logs and spans do not fit together; synchronize the clocks of both hosts (NTP) and restart the node"
    )


class Clock(Protocol):
    """A source of time."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wall_s(self) -> float:
        """Seconds since the Unix epoch, for records."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Return after `duration_s` seconds of this clock. If it is <= 0, yield to the loop once."""
        ...


def time_limit(clock: Clock, limit_s: float) -> AbstractAsyncContextManager[asyncio.Timeout]:
    """Cancel the body after `limit_s` seconds of `clock` and raise TimeoutError, as `asyncio.timeout` does."""
    # The loop has the time of the system's clock, and its alarm needs no task.
    return asyncio.timeout(limit_s) if isinstance(clock, SystemClock) else _time_limit_of(clock, limit_s)


@asynccontextmanager
async def _time_limit_of(clock: Clock, limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout` with another alarm. It distinguishes its cancellation from one by another task."""

    async def ring(limit: asyncio.Timeout) -> None:
        await clock.sleep(limit_s)
        limit.reschedule(asyncio.get_running_loop().time())

    async with asyncio.timeout(None) as limit:
        alarm = asyncio.ensure_future(ring(limit))
        try:
            yield limit
        finally:
            alarm.cancel()


class SystemClock:
    """The clocks of the machine."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    async def sleep(self, duration_s: float) -> None:
        await asyncio.sleep(max(0.0, duration_s))


class ManualClock:
    """A clock that changes only when it is advanced. Sleepers wake in order of their deadline, then of their call.

    `advance` moves in one step, so a task that wakes and sleeps again counts from the new time. `run_for` moves from
    deadline to deadline, so that periodic tasks run as often as in real time.
    """

    def __init__(self, *, monotonic_s: float = 0.0, wall_s: float = 1_700_000_000.0) -> None:
        self._now_s = monotonic_s
        self._wall_offset_s = wall_s - monotonic_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def monotonic_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s + self._wall_offset_s

    async def sleep(self, duration_s: float) -> None:
        if duration_s <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + duration_s, next(self._order), woken))
        await woken

    def next_deadline_s(self) -> float:
        """Return the `monotonic_s` at which the next sleeper wakes; infinity if no task sleeps."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)  # cancelled while asleep
        return self._sleepers[0][0] if self._sleepers else math.inf

    def num_sleepers(self) -> int:
        """Return the number of sleeping tasks. A test waits for it before it advances."""
        return sum(not woken.done() for _, _, woken in self._sleepers)

    def advance(self, duration_s: float) -> None:
        """Move time forward and wake the tasks that are due. They run when the caller next yields to the loop."""
        if duration_s < 0:
            raise ValueError(f"`duration_s` must be >= 0, got {duration_s}")
        self._now_s += duration_s
        self._wake_due()

    async def run_for(self, duration_s: float, *, turns: int = 20) -> None:
        """Move time forward deadline by deadline. After each, let the loop run `turns` times, so that woken tasks can
        sleep again."""
        end_s = self._now_s + duration_s
        await _yield_to_loop(turns)
        while (deadline_s := self.next_deadline_s()) <= end_s:
            self._now_s = deadline_s
            self._wake_due()
            await _yield_to_loop(turns)
        self._now_s = end_s

    def _wake_due(self) -> None:
        while self.next_deadline_s() <= self._now_s:
            heapq.heappop(self._sleepers)[2].set_result(None)


async def _yield_to_loop(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
