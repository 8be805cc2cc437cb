"""The archive segments of one run in one folder of one host.

    FOLDER/00000001-000000000001-000000050000-1f3a...archive     number, first and last record, start of its SHA-256

A name contains what identifies the segment, and a file that is being written has a random one, so that two coordinators
of one run, one of which is fenced, never write to the same file. A segment gets its name only when it is durable. It
counts once the ledger has its ArchiveSealed; until then its records are in the stream too.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rollmesh.shared.bus.archive_segment import SegmentDamaged, SegmentReader, write_segment
from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.store.disk import disk_full_errors
from rollmesh.shared.store.private_files import private_folder, private_opener
from rollmesh.shared.store.whole_files import sync_folder

_NAME = re.compile(r"(\d{8})-(\d{12})-(\d{12})-([0-9a-f]{16})\.archive")
_PARTIAL = re.compile(r"(\d{8})-[0-9a-f]{16}\.partial")
"""A segment that is being written, by its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveSegment:
    """A segment by the name of its file."""

    path: Path
    number: int
    first: int
    last: int
    digest: str
    """First 16 hex digits of the SHA-256 of the file."""


class ArchiveFiles:
    """The segments of one run. Every method blocks for as long as the disk does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def segments(self) -> list[ArchiveSegment]:
        """Return all segments by number; empty without a folder. Raises SegmentDamaged if the folder cannot be read."""
        found = []
        for path in self._paths():
            if match := _NAME.fullmatch(path.name):
                number, first, last = (int(match[n]) for n in (1, 2, 3))
                found.append(ArchiveSegment(path=path, number=number, first=first, last=last, digest=match[4]))
        return sorted(found, key=lambda segment: (segment.number, segment.last))

    def _paths(self) -> list[Path]:
        try:
            return list(self.folder.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SegmentDamaged(
                f"the archive segments in {self.folder} cannot be listed: {error.strerror}; let this process read the "
                "folder",
                path=self.folder,
            ) from error

    def find(self, seq: int) -> ArchiveSegment | None:
        """Return a segment with the record `seq`. Raises SegmentDamaged if the folder cannot be read."""
        return next((segment for segment in self.segments() if segment.first <= seq <= segment.last), None)

    def covered(self, seq: int, *, without: ArchiveSegment | None = None) -> int:
        """Return the last record of the segments, except for one, that have all records from `seq` on; `seq` - 1 if
        none has `seq`."""
        last = seq - 1
        for segment in sorted(self.segments(), key=lambda segment: segment.first):
            if segment.first <= last + 1 and segment != without:
                last = max(last, segment.last)
        return last

    def write(self, run: str, number: int, records: Sequence[StreamRecord], before: LedgerHead) -> ArchiveSegment:
        """Write a durable segment of consecutive records after the head `before`. Raises DataLoss for a record that
        does not follow, and DiskFull."""
        self._make_folder()
        partial = self.folder / f"{number:08d}-{secrets.token_hex(8)}.partial"
        with disk_full_errors(self.folder):
            try:
                with open(partial, "w+b", opener=private_opener) as file:
                    index = write_segment(file, run, records, before)
                    file.flush()
                    os.fsync(file.fileno())
                sha256 = file_sha256(partial)
                name = f"{number:08d}-{index.first:012d}-{index.last:012d}-{sha256[:16]}.archive"
                partial.replace(self.folder / name)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
            sync_folder(self.folder)
        return ArchiveSegment(
            path=self.folder / name, number=number, first=index.first, last=index.last, digest=sha256[:16]
        )

    def _make_folder(self) -> None:
        """Create the folder, so that a power loss does not remove it."""
        missing = [folder for folder in (self.folder, self.folder.parent) if not folder.exists()]
        for folder in reversed(missing):
            private_folder(folder)
            sync_folder(folder.parent)
        private_folder(self.folder)

    def verify(self, segment: ArchiveSegment, records: Sequence[StreamRecord]) -> str:
        """Return the SHA-256 of the file after reading it. If it has other records, remove it and raise
        SegmentDamaged."""
        try:
            read = [record for block in self.read(segment) for record in block]
            same = list(map(_content, read)) == list(map(_content, records))
            sha256 = file_sha256(segment.path)
            if not same or not sha256.startswith(segment.digest):
                raise SegmentDamaged(
                    f"{segment.path} does not have what was written; check the disk", path=segment.path
                )
        except SegmentDamaged:
            segment.path.unlink(missing_ok=True)  # a reader must not find it in place of the one that is sealed
            raise
        return sha256

    def end(self, segment: ArchiveSegment) -> LedgerHead:
        """Return the head of the ledger after a segment, by its index. Raises SegmentDamaged."""
        with self._open(segment) as reader:
            return reader.index.end

    def read(
        self, segment: ArchiveSegment, from_seq: int = 1, *, evidence: bool = True
    ) -> Iterator[list[StreamRecord]]:
        """Yield the records of a segment from `from_seq` on, block by block, see `SegmentReader.records`."""
        with self._open(segment) as reader:
            yield from reader.records(from_seq, evidence=evidence)

    @contextmanager
    def _open(self, segment: ArchiveSegment) -> Iterator[SegmentReader]:
        try:
            with segment.path.open("rb") as file:
                reader = SegmentReader(file, str(segment.path))
                if (reader.index.first, reader.index.last) != (segment.first, segment.last):
                    raise SegmentDamaged(
                        f"archive segment {segment.path} has records {reader.index.first} to {reader.index.last}, "
                        "another range than its name; copy it from a backup into its folder",
                        path=segment.path,
                    )
                yield reader
        except OSError as error:
            raise SegmentDamaged(
                f"archive segment {segment.path} cannot be opened: {error.strerror}; copy it from a backup into its "
                "folder",
                path=segment.path,
            ) from error

    def drop_partial(self, number: int) -> None:
        """Remove what crashes left of segments up to `number`, which are sealed. Raises OSError."""
        for path in self._paths():
            if (match := _PARTIAL.fullmatch(path.name)) and int(match[1]) <= number:
                path.unlink(missing_ok=True)

    def size_bytes(self) -> int:
        """Return the size of all segments."""
        return sum(segment.path.stat().st_size for segment in self.segments())

    def remove_all(self) -> None:
        """Remove the folder. Idempotent."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder)


def _content(record: StreamRecord) -> tuple[int, bytes, str]:
    return record.seq, record.payload, record.msg_id


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, lower-case hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
