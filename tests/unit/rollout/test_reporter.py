"""Reports of a worker: those of one request stay below the size that one ledger record can have."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollmesh.services.rollout import reporter
from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.shared.clock import SystemClock
from rollmesh.v1 import coordinator_pb2, types_pb2


class Coordinator:
    """Take every report, and note how many came at once."""

    def __init__(self) -> None:
        self.nums: list[int] = []

    async def report(self, reports: Sequence[coordinator_pb2.EpisodeReport]) -> list[str]:
        self.nums.append(len(reports))
        return [""] * len(reports)


async def test_large_reports_travel_in_several_requests() -> None:
    coordinator = Coordinator()
    reports = reporter.Reporter(coordinator, WorkerConfig(report_window_s=0.0), SystemClock())  # type: ignore[arg-type]
    failure = types_pb2.Failure(message="x" * (reporter.REQUEST_BYTES // 2))
    large = [coordinator_pb2.EpisodeReport(failure=failure) for _ in range(3)]
    small = [coordinator_pb2.EpisodeReport() for _ in range(3)]
    assert await asyncio.gather(*(reports.report(one) for one in (*large, *small))) == [""] * 6
    await reports.close()
    assert coordinator.nums == [1, 1, 4]
