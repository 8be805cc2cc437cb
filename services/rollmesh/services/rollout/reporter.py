"""Report finished episodes in batches.

Reports are idempotent, so a request is retried until the coordinator responds or `give_up_s` has passed. Only one
request runs at a time; episodes that finish meanwhile join the next one. The queue is bounded by the worker's episodes,
because each waits for its acknowledgement.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.services.rollout.failures import retry_call
from rollmesh.services.rollout.ports import Coordinator
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import MeshError
from rollmesh.shared.telemetry.logs import apart
from rollmesh.shared.telemetry.tracing import traceparent
from rollmesh.v1 import coordinator_pb2

REPORTS_MAX = 4096
"""Maximum number of reports in one request, as the protocol specifies."""
REQUEST_BYTES = 1 << 20
"""Size above which reports wait for the next request. Each request becomes one ledger record."""


@dataclass(slots=True)
class _PendingReport:
    report: coordinator_pb2.EpisodeReport
    result: asyncio.Future[str]


class Reporter:
    """Send reports to the coordinator."""

    def __init__(self, coordinator: Coordinator, config: WorkerConfig, clock: Clock) -> None:
        self._coordinator = coordinator
        self._config = config
        self._clock = clock
        self._waiting: list[_PendingReport] = []
        self._pump: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        """Number of reports not yet sent."""
        return len(self._waiting)

    async def report(self, report: coordinator_pb2.EpisodeReport) -> str:
        """Return "" once recorded, else the coordinator's reason for rejecting it. Raises `MeshError` after the last
        retry."""
        report.traceparent = traceparent()
        waiting = _PendingReport(report, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._pump is None:
            self._pump = asyncio.create_task(self._send_all(), context=apart())
        try:
            return await waiting.result
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    async def close(self) -> None:
        """Cancel the running request."""
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump])

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                await self._clock.sleep(self._config.report_window_s)
                await self._send(self._take())
        finally:
            self._pump = None

    def _take(self) -> list[_PendingReport]:
        """Remove and return the reports of one request: the oldest that fit, and at least one."""
        num = num_bytes = 0
        for waiting in self._waiting[:REPORTS_MAX]:
            num_bytes += waiting.report.ByteSize()
            if num and num_bytes > REQUEST_BYTES:
                break
            num += 1
        batch = self._waiting[:num]
        del self._waiting[:num]
        return batch

    async def _send(self, batch: list[_PendingReport]) -> None:
        reports = [waiting.report for waiting in batch]
        if not reports:
            return
        try:
            results = await retry_call(lambda: self._coordinator.report(reports), self._config, self._clock)
        except MeshError as err:
            for waiting in batch:
                if not waiting.result.done():
                    waiting.result.set_exception(err)
            return
        for waiting, result in zip(batch, results, strict=True):
            if not waiting.result.done():
                waiting.result.set_result(result)
