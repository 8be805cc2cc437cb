"""A bus whose ledgers continue before the first record of their stream, in archive segments of this host.

A ledger of this bus is one sequence: readers get archived records and those of the stream in order, and do not see
where one is stored. Appends go to the stream. A record moves while others read: its segment is complete before the
stream loses it, so a reader that finds a gap in the stream finds the segment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Unpack, cast

from rollmesh.shared.bus.archive_files import ArchiveFiles, ArchiveSegment
from rollmesh.shared.bus.archive_segment import SegmentDamaged
from rollmesh.shared.bus.bus import (
    AppendOptions,
    Bus,
    StreamInfo,
    StreamLog,
    StreamRecord,
    StreamSpec,
    UnknownRecord,
    UnknownStream,
)
from rollmesh.shared.bus.payload_bus import WrongHost
from rollmesh.shared.bus.run_streams import run_of_ledger, run_streams


class LostRecords(SegmentDamaged):
    """Archived records cannot be read: their segment is missing or damaged. A reader may continue after `last`."""

    reason = "LOST_RECORDS"

    @property
    def last(self) -> int:
        """Sequence of the last of them."""
        return int(self.metadata["last"])


class ArchivedLedger:
    """The ledger of a run: its archive segments and its stream. Implements `StreamLog`."""

    def __init__(self, stream: StreamLog, files: ArchiveFiles | None, *, writes: bool) -> None:
        self._stream = stream
        self.files = files
        """None on a host without the segments."""
        self.writes = writes
        """Whether old records are to move from the stream into segments."""

    @property
    def name(self) -> str:
        return self._stream.name

    async def append(self, payload: bytes, **options: Unpack[AppendOptions]) -> int:
        return await self._stream.append(payload, **options)

    async def append_pipelined(self, payload: bytes, **options: Unpack[AppendOptions]) -> asyncio.Future[int]:
        return await self._stream.append_pipelined(payload, **options)

    async def read(self, seq: int) -> StreamRecord:
        """As the stream's, or from a segment. Raises also LostRecords, and WrongHost without the segments."""
        try:
            return await self._stream.read(seq)
        except UnknownRecord:
            if not 0 < seq < (await self._stream.info()).first_seq:
                raise
            async with aclosing(self._archived(seq, evidence=True)) as records:
                async for record in records:
                    return record
            raise

    async def read_direct(self, seq: int) -> StreamRecord:
        """As `read`."""
        return await self.read(seq)

    def read_range(self, from_seq: int = 1) -> AsyncGenerator[StreamRecord, None]:
        """As the stream's, from the segments on. Raises also LostRecords, and WrongHost without the segments."""
        return self._joined(from_seq, self._stream.read_range, evidence=True)

    def scan(self, from_seq: int = 1) -> AsyncGenerator[StreamRecord, None]:
        """Yield as `read_range`, but without the evidence of archived rewards, so that their records do not have the
        hash in their header. It is cheaper, and for readers that look for something else."""
        return self._joined(from_seq, self._stream.read_range, evidence=False)

    def follow(self, from_seq: int = 1) -> AsyncGenerator[StreamRecord, None]:
        """As the stream's, from the segments on. Raises as `read_range`."""
        return self._joined(from_seq, self._stream.follow, evidence=True)

    async def last(self) -> StreamRecord | None:
        return await self._stream.last()

    async def purge_below(self, seq: int) -> None:
        """Remove records of the stream. Their segments must be sealed."""
        await self._stream.purge_below(seq)

    async def info(self) -> StreamInfo:
        """Return the state of the stream, without the segments."""
        return await self._stream.info()

    async def _joined(
        self, from_seq: int, tail: Callable[[int], AsyncIterator[StreamRecord]], *, evidence: bool
    ) -> AsyncGenerator[StreamRecord, None]:
        at = max(1, from_seq)
        while True:
            async with aclosing(self._archived(at, evidence=evidence)) as archived:
                async for record in archived:
                    yield record
                    at = record.seq + 1
            async with aclosing(cast("AsyncGenerator[StreamRecord, None]", tail(at))) as stored:
                async for record in stored:
                    if record.seq > at and (self.files is None or await self._find(at) is not None):
                        break  # records moved to a segment meanwhile
                    yield record
                    at = record.seq + 1
                else:
                    # A range ends at the record that was the newest when it began, which may have moved.
                    if at >= (await self._stream.info()).first_seq:
                        return

    async def _archived(self, at: int, *, evidence: bool) -> AsyncGenerator[StreamRecord, None]:
        """Yield the records from `at` on that the stream no longer has."""
        first_seq = (await self._stream.info()).first_seq
        while at < first_seq:
            segment = await self._find(at)
            if segment is None:
                if self.files is None:
                    raise WrongHost(
                        f"records {at} to {first_seq - 1} of {self.name} are in archive segments of the run's host, "
                        "which this process does not have; run the service or the command there, or share the run "
                        "folder and set `coordinator.archive.store: files`"
                    )
                later = min((s.first for s in await asyncio.to_thread(self.files.segments) if s.first > at), default=0)
                last = min(later or first_seq, first_seq) - 1
                raise LostRecords(
                    f"{self.name}: the archive segment of records {at} to {last} is missing in {self.files.folder}; "
                    "copy it from a backup into this folder",
                    first=at,
                    last=last,
                )
            async with aclosing(self._records(segment, at, evidence=evidence)) as records:
                async for record in records:
                    yield record
                    at = record.seq + 1

    async def _records(self, segment: ArchiveSegment, at: int, *, evidence: bool) -> AsyncGenerator[StreamRecord, None]:
        assert self.files is not None
        blocks = self.files.read(segment, at, evidence=evidence)
        try:
            while (block := await asyncio.to_thread(next, blocks, None)) is not None:
                for record in block:
                    yield record
                    at = record.seq + 1
        except SegmentDamaged as error:
            raise LostRecords(f"{self.name}: {error.message}", first=at, last=segment.last) from error

    async def _find(self, seq: int) -> ArchiveSegment | None:
        return await asyncio.to_thread(self.files.find, seq) if self.files is not None else None


class ArchiveBus:
    """`bus`, whose ledgers are `ArchivedLedger`s. Implements `Bus`."""

    def __init__(self, bus: Bus, folder: Path | None, *, writes: bool) -> None:
        """`folder` holds one folder per run, None on another host. `writes`: see `ArchivedLedger`."""
        self._bus = bus
        self._folder = folder
        self._writes = writes

    async def create(self, spec: StreamSpec) -> StreamLog:
        return self._with_archive(await self._bus.create(spec))

    async def open(self, name: str) -> StreamLog:
        return self._with_archive(await self._bus.open(name))

    async def names(self) -> list[str]:
        return await self._bus.names()

    async def delete(self, name: str) -> None:
        """Remove also the segments, unless the ledger never had a record: they are then those of another NATS."""
        run = run_of_ledger(name)
        try:
            is_new = bool(run) and (await (await self._bus.open(name)).info()).last_seq == 0
        except UnknownStream:
            is_new = False  # an earlier call removed the stream
        await self._bus.delete(name)
        if run and self._folder is not None and not is_new:
            await asyncio.to_thread(ArchiveFiles(self._folder / run).remove_all)

    async def close(self) -> None:
        await self._bus.close()

    def _with_archive(self, stream: StreamLog) -> StreamLog:
        run = run_of_ledger(stream.name)
        if not run:
            return stream
        files = ArchiveFiles(self._folder / run) if self._folder is not None else None
        return ArchivedLedger(stream, files, writes=self._writes and files is not None)


async def open_ledger(bus: Bus, run: str) -> StreamLog:
    """Return the ledger of a run, old records included if `bus` has its archive. Raises UnknownStream, InvalidInput."""
    return await bus.open(run_streams(run).ledger.name)


def scan_ledger(ledger: StreamLog, from_seq: int = 1) -> AsyncIterator[StreamRecord]:
    """Yield as `read_range`, without the evidence of archived rewards: for readers that look for something else."""
    return ledger.scan(from_seq) if isinstance(ledger, ArchivedLedger) else ledger.read_range(from_seq)
