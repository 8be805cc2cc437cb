"""A time limit by the injected clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollmesh.shared.clock import Clock


@asynccontextmanager
async def time_limit(clock: Clock, limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Cancels the body after `limit_s` seconds of `clock` and raises TimeoutError then, as `asyncio.timeout` does.

    `asyncio.timeout` keeps apart its own cancellation and one from outside; only its alarm is replaced by ours.
    """
    async with asyncio.timeout(None) as limit:
        alarm = asyncio.ensure_future(_ring(clock, limit_s, limit))
        try:
            yield limit
        finally:
            alarm.cancel()


async def _ring(clock: Clock, limit_s: float, limit: asyncio.Timeout) -> None:
    await clock.sleep(limit_s)
    limit.reschedule(asyncio.get_running_loop().time())
