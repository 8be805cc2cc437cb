"""Gather samples for scorers that score several in one call.

A sample waits at most `wait_s` for others. A full batch is sent immediately. A call is cancelled when all callers that
wait for it have been cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollmesh.services.reward.item import ScoreItem
from rollmesh.services.reward.scorer_run import Scored
from rollmesh.shared.telemetry.logs import apart

_Waiting = tuple[ScoreItem, asyncio.Future[Scored]]


class Batcher:
    """The batches of one scorer."""

    def __init__(
        self, call: Callable[[Sequence[ScoreItem]], Awaitable[list[Scored]]], *, size_max: int, wait_s: float
    ) -> None:
        self._call = call
        self._size_max = size_max
        self._wait_s = wait_s
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def submit(self, item: ScoreItem) -> Scored:
        """Return the result of a sample."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Scored] = loop.create_future()
        self._waiting.append((item, answer))
        if len(self._waiting) >= self._size_max:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._send)
        return await answer

    async def close(self) -> None:
        """Cancel the calls in progress, and the samples that wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for _, answer in waiting:
            answer.cancel()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [(item, answer) for item, answer in self._waiting if not answer.done()]
        self._waiting = []
        if not batch:
            return
        task = asyncio.create_task(self._run(batch), context=apart())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        for _, answer in batch:
            answer.add_done_callback(lambda _: task.cancel() if all(one.done() for _, one in batch) else None)

    async def _run(self, batch: Sequence[_Waiting]) -> None:
        try:
            results = await self._call([item for item, _ in batch])
        except asyncio.CancelledError:
            for _, answer in batch:
                answer.cancel()
            raise
        except BaseException as error:
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            raise
        for (_, answer), result in zip(batch, results, strict=True):
            if not answer.done():
                answer.set_result(result)
