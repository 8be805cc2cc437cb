"""Size of the ledger, time of recovery, and time and memory of the audit, after 10^5 and 10^6 samples.

The facts of an ordinary run (`history`) are appended to a real nats-server through the ledger of the coordinator, and
its archiver moves old records to segments, or not. Then the recovery of the coordinator restores the state: from the
newest snapshot, as a restart does, and from the whole ledger, as after the loss of all snapshots. The audit runs in a
separate process, whose peak of memory is measured. The baseline in the same run reads the same records without decoding
them.

Seconds are those of CPU of the process, so that the load of the machine does not matter; nats-server has its own.

How to read it: recovery with a snapshot must not grow with the run; without one it is linear. `state` is the size of
the encoded snapshot, and `stream` that of the records in the stream; both must not grow with the number of ended
samples. `archived/sample` is the size of the segments divided by the number of samples whose score is in them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from benchmarks.history import SAMPLES_PER_UPDATE, SPEC, History
from benchmarks.report import Report
from rollmesh.services.coordinator.archiver import Archiver
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.config import ArchiveConfig, RunLimits
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.facts import Fact
from rollmesh.services.coordinator.driver import RunDriver
from rollmesh.services.coordinator.ledger import Ledger
from rollmesh.services.coordinator.recovery import recover
from rollmesh.services.coordinator.snapshots import SnapshotStore, encode_snapshot
from rollmesh.shared.bus.archive_bus import ArchiveBus, ArchivedLedger
from rollmesh.shared.bus.bus import StreamLog
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import StreamLimits, run_streams
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead

NUM_SAMPLES = (100_000, 1_000_000)
LOGIN = BusLogin(user="rollmesh", password="bench")
APPEND_S_MAX = 60.0
STREAM_BYTES = {True: 64 << 20, False: 8 << 30}
"""Limit of the stream, with and without an archive. The archive begins at a quarter of it."""


def run(quick: bool) -> Report:
    limits, archive = RunLimits(), ArchiveConfig()
    report = Report(
        "ledger",
        f"groups of 16, batches of 16 groups, snapshot every {limits.snapshot_records:,} records, segments of "
        f"{archive.segment_bytes >> 20} MiB, at most half of what the stream keeps",
    )
    for num in (10_000,) if quick else NUM_SAMPLES:
        for archives in (True, False):
            with TemporaryDirectory(prefix="rollmesh-bench-") as folder:
                report.rows.append(asyncio.run(_measure(Path(folder), num, archives=archives, quick=quick)))
    return report


async def _measure(folder: Path, num_samples: int, *, archives: bool, quick: bool) -> dict[str, Any]:
    async with EmbeddedServer(folder / "nats", login=LOGIN) as server:
        bus = await _connect(folder, server.url)
        try:
            bytes_max = STREAM_BYTES[archives] >> (4 if quick and archives else 0)
            log = await bus.create(run_streams(SPEC.run, StreamLimits(ledger_bytes_max=bytes_max)).ledger)
            assert isinstance(log, ArchivedLedger)
            return await _written_and_read(folder, server.url, log, num_samples, archives=archives, quick=quick)
        finally:
            await bus.close()


async def _connect(folder: Path, url: str) -> ArchiveBus:
    return ArchiveBus(await JetStreamBus.connect(url, login=LOGIN), folder / "archive", writes=True)


async def _written_and_read(
    folder: Path, url: str, log: ArchivedLedger, num_samples: int, *, archives: bool, quick: bool
) -> dict[str, Any]:
    assert log.files is not None
    snapshots = SnapshotStore(folder / "snapshots")
    writer = _Writer(log, snapshots, RunLimits().snapshot_records // (10 if quick else 1))
    write_s = await writer.write(num_samples, archives=archives)
    num_records, read_s = await _read(log)
    newest_s = await _recover(log, snapshots)
    whole_s = await _recover(log, SnapshotStore(folder / "none"))
    audit_s, audit_mb = await asyncio.to_thread(_audited, folder, url)
    return {
        "samples": f"{writer.core.state.counters.reserved:,}",
        "archive": "yes" if archives else "no",
        "records": f"{num_records:,}",
        "stream MB": (await log.info()).num_bytes / 1e6,
        "archive MB": log.files.size_bytes() / 1e6,
        "archived/sample": log.files.size_bytes() / max(1, writer.num_archived),
        "decided and written, CPU s": write_s,
        "of it archived, CPU s": writer.archive_s,
        "state KB": writer.snapshot_bytes / 1e3,
        "recovery from snapshot, CPU s": newest_s,
        "from all records, CPU s": whole_s,
        "bare read, CPU s": read_s,
        "audit, CPU s": audit_s,
        "audit peak MB": audit_mb,
    }


@dataclass(slots=True)
class _Mark:
    """Number of samples that were reserved up to a record."""

    position: int
    num_samples: int


class _Writer:
    """Writes a ledger with the core and the archiver of a coordinator. It is the driver that the archiver uses."""

    run = SPEC.run
    live = True

    def __init__(self, log: ArchivedLedger, snapshots: SnapshotStore, snapshot_records: int) -> None:
        self._snapshot_records = snapshot_records
        self._history = History()
        self._ledger = Ledger(log, ids=RandomIds(), clock=SystemClock(), append_s_max=APPEND_S_MAX)
        self._archiver = Archiver(cast(RunDriver, self), log, ArchiveConfig())
        self._snapshots = snapshots
        self._snapshot_position = 0
        self._marks: list[_Mark] = []
        self._stored: asyncio.Future[int]
        self.snapshot_bytes = 0
        self.archive_s = 0.0

    @property
    def core(self) -> Core:
        return self._history.core

    @property
    def num_archived(self) -> int:
        """Number of archived samples, up to the last update that is archived as a whole."""
        return max((m.num_samples for m in self._marks if m.position <= self.core.state.archived), default=0)

    async def write(self, num_samples: int, *, archives: bool) -> float:
        """Write the ledger and return the seconds."""
        begin_s = time.process_time()
        await self._ledger.begin(EMPTY)
        for decisions in self._history.updates(-(-num_samples // SAMPLES_PER_UPDATE)):
            for facts in decisions:
                await self._append(facts)
            self._marks.append(_Mark(self._ledger.head.position, self.core.state.counters.reserved))
            if self._ledger.head.position - self._snapshot_position >= self._snapshot_records:
                self._snapshot_position = self._ledger.head.position
                body = encode_snapshot(self.core.state, self._ledger.head)
                self._snapshots.save(body, self._snapshot_position)
                self.snapshot_bytes = len(body)
                if archives:
                    await self._archive()
        await self._stored
        return time.process_time() - begin_s

    async def _archive(self) -> None:
        begin_s = time.process_time()
        while await self._archiver.step(self._snapshot_position) is not None:
            pass
        self.archive_s += time.process_time() - begin_s

    async def _append(self, facts: tuple[Fact, ...]) -> None:
        if facts:
            self._stored = await self._ledger.append(facts)

    async def read(self, read: Callable[[Core, LedgerHead], Any]) -> Any:
        await self._stored
        return read(self.core, self._ledger.head)

    async def submit(self, make: Callable[[int], i.SealArchive]) -> None:
        await self._append(self._history.seal(make(0).segment))
        await self._stored

    async def measure_ledger(self) -> None:
        await self._ledger.measure()


async def _read(log: StreamLog) -> tuple[int, float]:
    begin_s, num = time.process_time(), 0
    async for _ in log.read_range(1):
        num += 1
    return num, time.process_time() - begin_s


async def _recover(log: StreamLog, snapshots: SnapshotStore) -> float:
    begin_s = time.process_time()
    await recover(log, snapshots)
    return time.process_time() - begin_s


def _audited(folder: Path, url: str) -> tuple[float, float]:
    """Return the seconds and the peak of memory, MB, of an audit in a separate process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_audit_here, (folder, url))


def _audit_here(folder: Path, url: str) -> tuple[float, float]:
    async def audit() -> float:
        bus = await _connect(folder, url)
        begin_s = time.process_time()
        report = await audit_run(bus, SPEC.run)
        assert report.holds, report.to_text()
        await bus.close()
        return time.process_time() - begin_s

    seconds = asyncio.run(audit())
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
