"""The archive segments of one run in one folder of one host.

    FOLDER/00000001-000000000001-000000050000-1f3a...archive     number, first and last record, start of its SHA-256

A name contains what identifies the segment, so that two coordinators of one run, one of which is fenced, never write to
the same file. A segment gets its name only when it is durable. It counts once the ledger has its ArchiveSealed; until
then its records are in the stream too.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollmesh.shared.bus.archive_segment import SegmentDamaged, SegmentReader, write_segment
from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.store.disk import disk_full_errors
from rollmesh.shared.store.private_files import private_folder, private_opener

_NAME = re.compile(r"(\d{8})-(\d{12})-(\d{12})-([0-9a-f]{16})\.archive")
_PARTIAL = "writing.partial"
_READ_BYTES = 1024 * 1024


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
        """Return all segments by number; empty without a folder."""
        found = []
        with suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                if match := _NAME.fullmatch(path.name):
                    number, first, last = (int(match[n]) for n in (1, 2, 3))
                    found.append(ArchiveSegment(path=path, number=number, first=first, last=last, digest=match[4]))
        return sorted(found, key=lambda segment: (segment.number, segment.last))

    def find(self, seq: int) -> ArchiveSegment | None:
        """Return a segment with the record `seq`."""
        return next((segment for segment in self.segments() if segment.first <= seq <= segment.last), None)

    def write(self, run: str, number: int, records: Sequence[StreamRecord], before: LedgerHead) -> ArchiveSegment:
        """Write a durable segment of consecutive records after the head `before`. Raises DataLoss for a record that
        does not follow, and DiskFull."""
        partial = private_folder(self.folder) / _PARTIAL
        with disk_full_errors(self.folder):
            with open(partial, "w+b", opener=private_opener) as file:
                index = write_segment(file, run, records, before)
                file.flush()
                os.fsync(file.fileno())
            sha256 = file_sha256(partial)
            name = f"{number:08d}-{index.first:012d}-{index.last:012d}-{sha256[:16]}.archive"
            partial.replace(self.folder / name)
            _sync_folder(self.folder)
        return ArchiveSegment(
            path=self.folder / name, number=number, first=index.first, last=index.last, digest=sha256[:16]
        )

    def verify(self, segment: ArchiveSegment, records: Sequence[StreamRecord]) -> str:
        """Return the SHA-256 of the file after reading it. Raises SegmentDamaged if it has other records."""
        read = [record for block in self.read(segment) for record in block]
        same = list(map(_content, read)) == list(map(_content, records))
        sha256 = file_sha256(segment.path)
        if not same or not sha256.startswith(segment.digest):
            raise SegmentDamaged(f"{segment.path} does not have what was written; check the disk", path=segment.path)
        return sha256

    def read(
        self, segment: ArchiveSegment, from_seq: int = 1, *, evidence: bool = True
    ) -> Iterator[list[StreamRecord]]:
        """Yield the records of a segment from `from_seq` on, block by block, see `SegmentReader.records`."""
        try:
            with segment.path.open("rb") as file:
                reader = SegmentReader(file, str(segment.path))
                if (reader.index.first, reader.index.last) != (segment.first, segment.last):
                    raise SegmentDamaged(
                        f"archive segment {segment.path} has records {reader.index.first} to {reader.index.last}, "
                        "another range than its name; copy it from a backup into its folder",
                        path=segment.path,
                    )
                yield from reader.records(from_seq, evidence=evidence)
        except OSError as error:
            raise SegmentDamaged(
                f"archive segment {segment.path} cannot be opened: {error.strerror}; copy it from a backup into its "
                "folder",
                path=segment.path,
            ) from error

    def drop_unsealed(self, num_sealed: int, first_seq: int) -> list[ArchiveSegment]:
        """Remove the segments that the ledger does not name, and return them. A segment with records before
        `first_seq`, the first one of the stream, stays: the stream may have lost its newest records, and with them the
        fact, in a power loss."""
        found = self.segments()
        dropped = [segment for segment in found if segment.number > num_sealed and segment.first >= first_seq]
        for segment in dropped:
            segment.path.unlink(missing_ok=True)
        (self.folder / _PARTIAL).unlink(missing_ok=True)
        return dropped

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
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
