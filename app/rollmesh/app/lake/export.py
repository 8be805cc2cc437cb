"""Export every ended sample of a run, with its lineage, to Parquet files.

The ledger is read twice (`lineage`), and payloads update by update, so memory does not grow with the run. A second call
adds what has ended since. Files that the ledger no longer confirms, such as those of an update that a roll-back undid
later, are replaced.

Collaborators: `lineage` (which samples ended how), `rows` (columns), `files` (partitions), `stored_samples` (payloads),
`replaced` (payloads of replaced files).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from google.protobuf.message import DecodeError

from rollmesh.app.config import load_train_config
from rollmesh.app.lake.files import FOLDER, UNTRAINED, Partitions, PartNote, PartWriter, owned
from rollmesh.app.lake.lineage import EndedTogether, Lineage, SampleLineage, UpdateFates
from rollmesh.app.lake.replaced import ReplacedFiles
from rollmesh.app.lake.rows import row
from rollmesh.app.run_bus import run_bus
from rollmesh.app.run_folder import RunFolder
from rollmesh.app.samples.samples import SampleLine
from rollmesh.app.samples.stored_samples import stored_lines
from rollmesh.services.coordinator.ledger import StoredRecord, read_ledger
from rollmesh.shared.bus.archive_bus import open_ledger
from rollmesh.shared.bus.bus import Bus, StreamLog, UnknownStream
from rollmesh.shared.bus.run_streams import run_of_ledger, run_streams
from rollmesh.shared.errors import ConfigError, DataLoss, InvalidInput, UnknownRun
from rollmesh.shared.store.payload_files import UnreadableRecord

READS_MAX = 16
"""Number of payloads that are read at once."""
CHUNK_ROWS = 512
CHUNK_BYTES = 8 << 20
"""Rows, and bytes of their payloads, that are in memory at once and make a row group."""
PART_ROWS = 65_536
"""Rows after which the samples that no update trained continue in another file."""


_log = logging.getLogger(__name__)


class LakeExport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export. Rows are samples, and episodes that ended without one."""

    run: str
    folder: str
    num_rows: int
    """Rows of all files."""
    num_new: int
    """Rows that this call wrote."""
    num_stored: int
    """Rows with tokens and messages; the payloads of the others were purged, or never existed."""
    num_damaged: int
    """Payloads that this call could not read."""
    num_live: int
    """Reservations that have not ended, and samples whose update is not in a checkpoint. A later export has them."""
    num_updates: int
    """Updates with a file."""
    out: str = ""
    """File with conversations, if they were asked for."""
    num_written: int = 0
    """Number of conversations in it."""


class _RunExport:
    """One export of one run."""

    def __init__(self, partitions: Partitions, ledger: str, samples: StreamLog | None, replaced: ReplacedFiles) -> None:
        self._partitions = partitions
        self._ledger = ledger
        self._samples = samples
        self._replaced = replaced
        self.num_new = 0
        self.num_damaged = 0

    async def write_update(self, ended: EndedTogether, digest: str) -> None:
        assert ended.update is not None
        with self._partitions.part(ended.update.update, self._note(digest=digest)) as part:
            await self._write_chunks(part, ended.samples)
            part.reaches(ended)

    async def write_others(self, ends: AsyncIterator[EndedTogether], after: int) -> None:
        """Write the samples that no update trained. A file ends between two records of the ledger."""
        first = await anext(ends, None)
        while first is not None:
            with self._partitions.part(UNTRAINED, self._note(after=after)) as part:
                waiting = list(first.samples)
                part.reaches(first)
                first = None
                async for ended in ends:
                    if part.note.num_rows >= PART_ROWS:
                        first = ended
                        break
                    waiting += ended.samples
                    part.reaches(ended)
                    if _is_full(waiting):
                        await self._write_chunks(part, waiting)
                        waiting = []
                await self._write_chunks(part, waiting)
                after = part.note.through

    def _note(self, *, digest: str = "", after: int = 0) -> PartNote:
        return PartNote(run=self._partitions.run, ledger=self._ledger, digest=digest, after=after)

    async def _write_chunks(self, part: PartWriter, samples: Iterable[SampleLineage]) -> None:
        for chunk in chunks(samples):
            await self._write(part, chunk)

    async def _write(self, part: PartWriter, samples: Sequence[SampleLineage]) -> None:
        lines: dict[str, SampleLine] = {}
        payloads = list({sample.payload.sequence: sample for sample in samples if sample.payload.sequence}.values())
        for at in range(0, len(payloads), READS_MAX):
            for found in await asyncio.gather(*map(self._lines, payloads[at : at + READS_MAX])):
                lines |= {line.sample_id: line for line in found}
        missing = [sample.meta.sample_id for sample in samples if sample.meta and sample.meta.sample_id not in lines]
        lines |= self._replaced.lines(missing)
        part.write([row(sample, lines.get(sample.meta.sample_id) if sample.meta else None) for sample in samples])
        self.num_new += len(samples)

    async def _lines(self, sample: SampleLineage) -> list[SampleLine]:
        if self._samples is None:
            return []
        try:
            return await stored_lines(self._samples, sample.payload.sequence, sample.group.task)
        except (UnreadableRecord, DecodeError, InvalidInput) as err:
            _log.warning("payload skipped: episode=%s: %s", sample.episode, err)
            self.num_damaged += 1
            return []


def chunks(samples: Iterable[SampleLineage]) -> Iterator[list[SampleLineage]]:
    """Yield the samples in lists of limited size."""
    chunk: list[SampleLineage] = []
    for sample in samples:
        chunk.append(sample)
        if _is_full(chunk):
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _is_full(samples: Sequence[SampleLineage]) -> bool:
    return len(samples) >= CHUNK_ROWS or sum(sample.payload.size_bytes for sample in samples) >= CHUNK_BYTES


async def export_samples(
    bus: Bus, run: str, folder: Path, on_update: Callable[[int], None] = lambda _: None
) -> LakeExport:
    """Export the samples of `run` below `folder`. `on_update` gets the number of each update that is written.

    Raises UnknownRun, DataLoss for a damaged ledger, FolderBusy, ConfigError for a folder with samples of another run
    of this name.
    """
    streams, partitions = run_streams(run), Partitions(folder, run)
    log = await open_ledger(bus, run)
    try:
        samples = await bus.open(streams.samples.name)
    except UnknownStream:
        samples = None
    with owned(partitions.folder):  # also while the ledger is read: no other call may write what it lacks
        notes = partitions.notes()
        fates, ledger = UpdateFates(), _LedgerHashes({note.through for note in notes.values()})
        async for record in read_ledger(log):
            fates.enter(record)
            ledger.enter(record)
        known, through, undone = _known(run, notes, ledger, {commit.digest for commit in fates.settled.values()})
        replaced = ReplacedFiles(run, undone)
        work, lineage = _RunExport(partitions, ledger.first, samples, replaced), Lineage(fates.settled)

        async def others() -> AsyncIterator[EndedTogether]:
            """Write the files of updates on the way."""
            async for ended in _ends(log, lineage, ledger.end):
                if ended.update is None:
                    if ended.position > through:
                        yield ended
                elif ended.samples and ended.update.digest not in known:
                    await work.write_update(ended, ended.update.digest)
                    on_update(ended.update.update)

        await work.write_others(others(), through)
        replaced.remove()
        notes = partitions.notes()
        return LakeExport(
            run=run,
            folder=str(folder),
            num_rows=sum(note.num_rows for note in notes.values()),
            num_new=work.num_new,
            num_stored=sum(note.num_stored for note in notes.values()),
            num_damaged=work.num_damaged,
            num_live=lineage.num_live,
            num_updates=sum(bool(note.digest) for note in notes.values()),
        )


async def _ends(log: StreamLog, lineage: Lineage, end: int) -> AsyncIterator[EndedTogether]:
    """Yield what the records up to `end` ended. Raises DataLoss if a fact names a sample that the ledger lacks."""
    async for record in read_ledger(log):
        if record.position > end:
            return
        try:
            ended = list(lineage.enter(record))
        except KeyError as err:
            raise DataLoss(
                f"{log.name}: record {record.position} names {err}, which no earlier record has; see `rollmesh audit`",
                ledger=log.name,
                position=record.position,
            ) from err
        for one in ended:
            yield one


class _LedgerHashes:
    """Hashes of the first record of a ledger and of those at some positions."""

    def __init__(self, positions: Container[int]) -> None:
        self._positions = positions
        self._hashes: dict[int, str] = {}
        self.first = ""
        self.end = 0
        """Position of the last record."""

    def enter(self, record: StoredRecord) -> None:
        self.first, self.end = self.first or record.hash, record.position
        if record.position in self._positions:
            self._hashes[record.position] = record.hash

    def has(self, note: PartNote) -> bool:
        """Return whether the records up to `through` of a file are in this ledger."""
        return self._hashes.get(note.through) == note.hash


def _known(
    run: str, notes: Mapping[Path, PartNote], ledger: _LedgerHashes, digests: Container[str]
) -> tuple[set[str], int, list[Path]]:
    """Return the digests of the updates that have a file, the position up to which all other ends have one, and the
    files to replace: those of updates that were undone since, those of records that the ledger lost, and those after a
    file that was removed. Raises ConfigError for the files of another run."""
    known, through, replaced = set[str](), 0, list[Path]()
    for path, note in sorted(notes.items(), key=lambda item: item[1].after):
        if note.ledger != ledger.first:
            raise ConfigError(f"{path}: has samples of an earlier run of the name {run!r}; export to another folder")
        confirmed = ledger.has(note)
        if confirmed and not note.digest and note.after == through:
            through = note.through
        elif confirmed and note.digest in digests:
            known.add(note.digest)
        else:
            replaced.append(path)
    return known, through, replaced


def export_folder(
    root: Path, *, name: str = "", folder: Path | None = None, on_update: Callable[[int], None] = lambda _: None
) -> LakeExport:
    """Export a run of a run folder, which may be running. `name`: its name, if the mesh served several. `folder`: by
    default `samples` in the run folder.

    Raises ConfigError if `root` is not a run's folder, BusUnavailable, and the errors of `export_samples`.
    """
    return asyncio.run(_export_folder(RunFolder(root.resolve()), name, folder or root / FOLDER, on_update))


async def _export_folder(folder: RunFolder, name: str, out: Path, on_update: Callable[[int], None]) -> LakeExport:
    folder.read_origin()
    config = load_train_config(folder.config)
    run = name or config.run.name
    async with run_bus(folder, config) as bus:
        try:
            return await export_samples(bus, run, out, on_update)
        except UnknownStream as err:
            runs = sorted(filter(None, map(run_of_ledger, await bus.names())))
            there = f"--run-name takes one of: {', '.join(runs)}" if runs else "no run was created here"
            raise UnknownRun(f"{folder.root}: the ledger of run {run!r} does not exist; {there}", run=run) from err
