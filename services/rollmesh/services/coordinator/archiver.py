"""Move old records of a live run's ledger from its stream to archive segments.

    segment durable -> read back and compared -> ArchiveSealed stored -> stream purged below it

After a crash between two of these steps the records are still in the stream, or the ledger names their segment. So
`drop_unsealed` removes segments that the ledger does not name, and `step` first completes the purge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from rollmesh.services.coordinator.config import ArchiveConfig
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.facts import ArchiveSealed
from rollmesh.services.coordinator.core.state import State
from rollmesh.services.coordinator.driver import RunDriver
from rollmesh.shared.bus.archive_bus import ArchivedLedger
from rollmesh.shared.bus.archive_files import ArchiveFiles
from rollmesh.shared.bus.bus import StreamInfo, StreamLog, StreamRecord
from rollmesh.shared.domain.ledger_facts import read_record
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.process.fault_points import FaultPoint, Hook, noop

_log = logging.getLogger(__name__)


class ArchiveFaultPoint(FaultPoint):
    """Points in the order in which one segment reaches them."""

    WRITTEN = "written"
    """The segment is durable. It has not been read back."""
    VERIFIED = "verified"
    """The segment has the records. The ledger does not name it."""
    SEALED = "sealed"
    """The ledger names the segment. The stream still has its records."""
    PURGED = "purged"
    """The stream begins after the segment."""


class Archiver:
    """Archives one run."""

    def __init__(
        self,
        driver: RunDriver,
        ledger: StreamLog,
        config: ArchiveConfig,
        may_archive: Callable[[], bool] = lambda: True,
        *,
        at: Hook = noop,
    ) -> None:
        """`at` is awaited at each `ArchiveFaultPoint`. Nothing is archived while `may_archive` returns False."""
        self._may_archive = may_archive
        self._driver = driver
        self._ledger = ledger
        self._config = config
        self._at = at
        self._behind = -1
        """Position of the snapshot behind which there were too few records for a segment."""
        self._warned = False

    async def step(self, snapshot_position: int) -> ArchiveSealed | None:
        """Purge what is archived, and archive one segment of records up to the snapshot if the stream holds more than
        its share. Return the segment. Raises MeshError and OSError; a later call then repeats what is left."""
        ledger = self._ledger
        if not isinstance(ledger, ArchivedLedger) or not ledger.writes or ledger.files is None or not self._driver.live:
            return None
        archived, number = await self._driver.read(lambda core, _: (core.state.archived, core.state.num_segments))
        info = await ledger.info()
        if info.deny_purge:
            self._warn_of_old_stream()
            return None
        await self._purge(ledger, info, archived)
        held = info if info.first_seq > archived else await ledger.info()
        if held.num_bytes <= self._config.from_share * held.bytes_max or self._behind == snapshot_position:
            return None
        if not self._may_archive():
            return None
        records = await self._oldest(ledger, archived + 1, snapshot_position, held.bytes_max)
        if not records:
            self._behind = snapshot_position
            return None
        segment = await self._sealed(ledger.files, number + 1, records)
        await self._purge(ledger, held, segment.last)
        return segment

    async def _oldest(self, ledger: ArchivedLedger, first: int, last: int, bytes_max: int) -> list[StreamRecord]:
        """Return the records of the next segment; none if those up to `last` are too few."""
        enough = min(self._config.segment_bytes, int(self._config.from_share * bytes_max / 2))
        records, num_bytes = list[StreamRecord](), 0
        async with aclosing(ledger.read_range(first)) as found:
            async for record in found:
                if record.seq > last:
                    return []
                records.append(record)
                num_bytes += len(record.payload)
                if num_bytes >= enough:
                    return records
        return []

    async def _sealed(self, files: ArchiveFiles, number: int, records: list[StreamRecord]) -> ArchiveSealed:
        run, first = self._driver.run, records[0]
        before = LedgerHead(position=first.seq - 1, hash=read_record(first.payload, run, first.seq).previous.hex())
        written = await asyncio.to_thread(files.write, run, number, records, before)
        await self._at(ArchiveFaultPoint.WRITTEN)
        sha256 = await asyncio.to_thread(files.verify, written, records)
        await self._at(ArchiveFaultPoint.VERIFIED)
        segment = ArchiveSealed(
            number=number,
            first=written.first,
            last=written.last,
            sha256=sha256,
            size_bytes=written.path.stat().st_size,
        )
        await self._driver.submit(lambda ticket: i.SealArchive(ticket=ticket, segment=segment))
        await self._at(ArchiveFaultPoint.SEALED)
        _log.info("records archived: run=%s segment=%d records=%d-%d", run, number, segment.first, segment.last)
        return segment

    async def _purge(self, ledger: ArchivedLedger, info: StreamInfo, archived: int) -> None:
        if info.first_seq > archived:
            return
        await ledger.purge_below(archived + 1)
        await self._driver.measure_ledger()
        await self._at(ArchiveFaultPoint.PURGED)

    def _warn_of_old_stream(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s was created by a release without archives, so that NATS never removes its records: they stay in "
                "the stream until the run is deleted",
                self._ledger.name,
            )


async def drop_unsealed(ledger: StreamLog, state: State) -> None:
    """Remove the segments that a recovered ledger does not name."""
    if isinstance(ledger, ArchivedLedger) and ledger.writes and ledger.files is not None:
        first_seq = (await ledger.info()).first_seq
        for segment in await asyncio.to_thread(ledger.files.drop_unsealed, state.num_segments, first_seq):
            _log.info("archive segment removed, because the ledger does not name it: file=%s", segment.path)
