"""A node's way out: told to drain, it finishes once, and whoever hosts it waits here to take it down.

    retirement = Retirement(finish)
    retirement.begin()              # on the coordinator's command; again: no effect
    await retirement.wait()         # returns once `finish` has; never, if nobody begins

The finishing runs in a task of its own: it must outlive the stream that brought the command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Retirement:
    """Begins at most once. `finish` has a limit of its own."""

    def __init__(self, finish: Callable[[], Awaitable[None]]) -> None:
        self._finish = finish
        self._begun = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        return self._begun.is_set()

    def begin(self) -> None:
        """Starts finishing."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="finish and leave")
            self._begun.set()

    async def wait(self) -> None:
        """Until all is finished. Raises what kept it from that."""
        await self._begun.wait()
        assert self._task is not None
        await asyncio.shield(self._task)

    async def close(self) -> None:
        """Breaks the finishing off, for a node that is taken down anyway."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        await self._finish()
