"""Keep scores and swaps of weights apart: a score never spans a swap, and a waiting swap lets no new score start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SwapGate:
    """Any number of scores at once, or one swap."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._num_scores = 0
        self.swapping = False
        """Whether a swap runs or waits for scores to end."""

    @asynccontextmanager
    async def score(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.swapping)
            self._num_scores += 1
        try:
            yield
        finally:
            self._num_scores -= 1
            await self._notify()

    @asynccontextmanager
    async def swap(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.swapping)
            self.swapping = True
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._num_scores)
            yield
        finally:
            self.swapping = False
            await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
