"""Work that several callers wait for: one task per key, which continues if its callers are cancelled.

A caller that did the work itself would take it with it when its deadline is over, and the next caller would begin at
the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from rollmesh.shared.error_base import Cancelled
from rollmesh.shared.telemetry.logs import apart

K = TypeVar("K")
T = TypeVar("T")


class SharedTasks(Generic[K, T]):
    """The running tasks by key; iterates over the keys. `what` describes their work in errors."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._tasks: dict[K, asyncio.Task[T]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[K]:
        return iter(self._tasks)

    def running(self, key: K) -> asyncio.Task[T] | None:
        """Return the task of a key while it runs."""
        return self._tasks.get(key)

    async def join(self, key: K, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` as the only task of a key, or wait for the running one. Raises its error, and Cancelled after
        `cancel`."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(work(), name=f"{self._what} {key}", context=apart())
            task.add_done_callback(lambda done: self._ended(key, done))
        await asyncio.wait([task])
        if task.cancelled():
            raise Cancelled(f"{self._what} {key} was cancelled: it is no longer needed, or the service stops")
        return task.result()

    async def cancel(self, key: K) -> None:
        """Cancel the task of a key, and wait until it has ended."""
        if (task := self._tasks.get(key)) is not None:
            task.cancel()
            await asyncio.wait([task])

    async def close(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, key: K, task: asyncio.Task[T]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # every caller may have gone
