"""Move old records of a live run's ledger from its stream to archive segments.

    segment durable -> read back and compared -> ArchiveSealed stored -> stream purged below it

After a crash between two of these steps the records are still in the stream, or the ledger names their segment, and
`step` first completes the purge. The stream is purged only below records that a segment has. A sealed segment whose
file was lost is written again while the stream has its records.

A file that a crash or a fenced coordinator left is removed once the ledger names another segment with its number: no
coordinator can seal it any more. If a crash prevents that, the next coordinator removes it. Files with records of
another ledger are never removed, and nothing is archived beside them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from rollmesh.services.coordinator.config import ArchiveConfig
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.facts import ArchiveSealed
from rollmesh.services.coordinator.driver import RunDriver
from rollmesh.services.coordinator.fact_codec import decode_record
from rollmesh.services.coordinator.ledger import stored_bytes
from rollmesh.shared.bus.archive_bus import ArchivedLedger, LostRecords
from rollmesh.shared.bus.archive_files import ArchiveFiles, ArchiveSegment
from rollmesh.shared.bus.archive_segment import SegmentDamaged
from rollmesh.shared.bus.bus import StreamInfo, StreamLog, StreamRecord, UnknownRecord
from rollmesh.shared.domain.formats import NewerFormat
from rollmesh.shared.domain.ledger_facts import read_record
from rollmesh.shared.domain.ledger_head import LedgerHead, record_hash
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
        self._warnings: set[str] = set()
        self._has_dropped = False
        """Whether what an earlier coordinator left was removed."""
        self._rewritten_from = 0
        """First record whose lost segments this coordinator has tried to write again."""

    def needs_snapshot(self, snapshot_position: int) -> bool:
        """Return whether the stream holds more than its share, and too little of it is behind the newest snapshot."""
        return self._behind == snapshot_position

    async def step(self, snapshot_position: int) -> ArchiveSealed | None:
        """Purge what is archived, and archive one segment of records up to the snapshot if the stream holds more than
        its share. Return the segment. Raises MeshError and OSError; a later call then repeats what is left."""
        ledger = self._ledger
        if not isinstance(ledger, ArchivedLedger) or not ledger.writes or ledger.files is None or not self._driver.live:
            return None
        archived, number = await self._driver.read(lambda core, _: (core.state.archived, core.state.num_segments))
        info = await ledger.info()
        if info.deny_purge:
            self._warn_once(
                f"{ledger.name} was created by a release without archives, so that NATS never removes its records: "
                "they stay in the stream until the run is deleted"
            )
            return None
        if not self._has_dropped:
            await self._drop_earlier(ledger, ledger.files, number, info.first_seq)
            self._has_dropped = True
        if not await self._purge(ledger, ledger.files, info, archived):
            return None
        held = info if info.first_seq > archived else await ledger.info()
        if held.num_bytes <= self._config.from_share * held.bytes_max or self._behind == snapshot_position:
            return None
        if not self._may_archive() or await self._is_beside_others(ledger, ledger.files, number):
            return None
        records = await self._oldest(ledger, archived + 1, snapshot_position, held.bytes_max)
        if not records:
            self._behind = snapshot_position
            return None
        segment = await self._sealed(ledger.files, number + 1, records)
        await self._drop_leftovers(ledger, ledger.files, segment, held.first_seq)
        await self._purge(ledger, ledger.files, held, segment.last)
        return segment

    async def _oldest(self, ledger: ArchivedLedger, first: int, last: int, bytes_max: int) -> list[StreamRecord]:
        """Return the records of the next segment; none if those up to `last` are too few."""
        enough_stored = self._config.from_share * bytes_max / 2
        records, num_bytes, num_stored = list[StreamRecord](), 0, 0
        async with aclosing(ledger.read_range(first)) as found:
            async for record in found:
                if record.seq > last:
                    return []
                records.append(record)
                num_bytes += len(record.payload)
                num_stored += stored_bytes(ledger.name, record.payload, record.msg_id)
                if num_bytes >= self._config.segment_bytes or num_stored >= enough_stored:
                    return records
        return []

    async def _sealed(self, files: ArchiveFiles, number: int, records: list[StreamRecord]) -> ArchiveSealed:
        run = self._driver.run
        written = await asyncio.to_thread(files.write, run, number, records, self._head(records))
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

    async def _purge(self, ledger: ArchivedLedger, files: ArchiveFiles, info: StreamInfo, archived: int) -> bool:
        """Purge what is archived. Return False if a segment is missing and the stream lacks a part of it, so that the
        rest must stay in the stream."""
        if info.first_seq > archived:
            return True
        covered = await asyncio.to_thread(files.covered, info.first_seq)
        if covered < archived and self._rewritten_from != covered + 1:
            await self._rewrite(ledger, files, info.first_seq, covered, archived)
            self._rewritten_from = covered + 1
            covered = await asyncio.to_thread(files.covered, info.first_seq)
        if covered < archived:
            self._warn_once(
                f"the archive segment of records {covered + 1} to {archived} of {ledger.name} is missing in "
                f"{files.folder}: these records stay in the stream, and no more are archived; copy the segment from "
                "the run folder or the backup that has it into this folder"
            )
            return False
        await ledger.purge_below(archived + 1)
        await self._driver.measure_ledger()
        await self._at(ArchiveFaultPoint.PURGED)
        return True

    async def _rewrite(
        self, ledger: ArchivedLedger, files: ArchiveFiles, first_seq: int, covered: int, archived: int
    ) -> None:
        """Write the lost segments of the records after `covered` again, those of which the stream has every record."""
        async with aclosing(_sealed_after(ledger, covered)) as facts:
            async for sealed in facts:
                if sealed.last <= covered or sealed.first < first_seq:
                    continue
                records = list[StreamRecord]()
                async with aclosing(ledger.read_range(sealed.first)) as found:
                    async for record in found:
                        records.append(record)
                        if record.seq == sealed.last:
                            break
                written = await asyncio.to_thread(
                    files.write, self._driver.run, sealed.number, records, self._head(records)
                )
                if await asyncio.to_thread(files.verify, written, records) == sealed.sha256:
                    _log.warning("archive segment was lost, and is written again: file=%s", written.path)
                else:  # by another release of zstd, so that the audit would not find what the ledger names
                    await asyncio.to_thread(written.path.unlink)
                if sealed.last >= archived:
                    return

    def _head(self, records: list[StreamRecord]) -> LedgerHead:
        """Return the head of the ledger before records."""
        first = records[0]
        previous = read_record(first.payload, self._driver.run, first.seq).previous
        return LedgerHead(position=first.seq - 1, hash=previous.hex())

    async def _is_beside_others(self, ledger: ArchivedLedger, files: ArchiveFiles, number: int) -> bool:
        """Return whether the folder has segments of another ledger after segment `number`, and log that."""
        for segment in await asyncio.to_thread(files.segments):
            if segment.number > number and not await self._is_of(ledger, files, segment):
                self._warn_once(
                    f"{segment.path} is not a segment of {ledger.name}, or is damaged: it stays, and nothing is "
                    "archived. It may belong to the same run on another NATS. Move it to another folder if this "
                    "ledger is the right one"
                )
                return True
        return False

    async def _drop_earlier(self, ledger: ArchivedLedger, files: ArchiveFiles, number: int, first_seq: int) -> None:
        """Remove what a coordinator that exited between a seal and the removal left, of segments up to `number`."""
        ends: dict[int, list[int]] = {}
        for segment in await asyncio.to_thread(files.segments):
            if segment.number <= number:
                ends.setdefault(segment.number, []).append(segment.last)
        twice = {which: max(lasts) for which, lasts in ends.items() if len(lasts) > 1}
        if not twice:
            return
        async with aclosing(_sealed_after(ledger, min(twice.values()))) as facts:
            async for sealed in facts:
                if twice.pop(sealed.number, 0):
                    await self._drop_leftovers(ledger, files, sealed, first_seq)
                if not twice:
                    return

    async def _drop_leftovers(
        self, ledger: ArchivedLedger, files: ArchiveFiles, sealed: ArchiveSealed, first_seq: int
    ) -> None:
        """Remove the other files with the number of a sealed segment, unless they have records that neither the other
        segments nor the stream has: the stream may have lost its newest records, and with them a fact, in a power
        loss."""
        for segment in await asyncio.to_thread(files.segments):
            if segment.number != sealed.number or sealed.sha256.startswith(segment.digest):
                continue
            covered = await asyncio.to_thread(files.covered, segment.first, without=segment)
            is_stored = segment.last <= covered or first_seq <= covered + 1
            if is_stored and await self._is_of(ledger, files, segment):
                await asyncio.to_thread(segment.path.unlink, missing_ok=True)
                _log.info("archive segment removed, because the ledger names another: file=%s", segment.path)
        await asyncio.to_thread(files.drop_partial, sealed.number)

    async def _is_of(self, ledger: ArchivedLedger, files: ArchiveFiles, segment: ArchiveSegment) -> bool:
        """Return whether the last record of a segment is in the ledger."""
        try:
            end = await asyncio.to_thread(files.end, segment)
            return record_hash((await ledger.read(end.position)).payload) == end.hash
        except (SegmentDamaged, NewerFormat, UnknownRecord):
            return False

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warnings:
            self._warnings.add(warning)
            _log.warning("%s", warning)


async def _sealed_after(ledger: ArchivedLedger, position: int) -> AsyncGenerator[ArchiveSealed, None]:
    """Yield the facts of sealed segments in records after `position` that can be read. The fact of a segment follows
    its last record."""
    at = position + 1
    while at:
        try:
            async with aclosing(ledger.scan(at)) as found:
                async for record in found:
                    for fact in decode_record(record.payload).facts:
                        if isinstance(fact, ArchiveSealed):
                            yield fact
            at = 0
        except LostRecords as error:
            at = error.last + 1
