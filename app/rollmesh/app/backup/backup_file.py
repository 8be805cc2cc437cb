"""The file of `rollmesh backup`: a tar archive, and a check of the whole file.

    about.json                          what the backup is of
    samples/SEQ.msgpack ...             records of a stream in their order, as `StreamPart`; then ledger/..., dead/...
    files/PATH ...                      files of the run folder; a later one of the same name replaces the earlier one.
                                        The records of the ledger before its first part are in files/archive/RUN/,
                                        with every segment that its parts name
    end.json                            head of the ledger, and the SHA-256 of all bytes of the file before this member

The ledger's hash chain is verified when the file is written and when it is read, archive segments only when it is read.
The file contains samples and no token, password or key.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Literal, NoReturn, Self, cast

import msgspec

from rollmesh.mesh.run_layout import ARCHIVE
from rollmesh.services.coordinator.core.facts import ArchiveSealed
from rollmesh.services.coordinator.ledger import check_record
from rollmesh.shared.bus.archive_segment import check_segment
from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.ledger_facts import read_record
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead
from rollmesh.shared.errors import AlreadyExists, ConfigError, DataLoss
from rollmesh.shared.store.disk import disk_full_errors

Kind = Literal["samples", "ledger", "dead"]
KINDS: tuple[Kind, ...] = ("samples", "ledger", "dead")
FORMAT = 3
FORMATS_READ = (2, 3)
"""Format 2 has no archive segments."""
PART_BYTES = 4 * 1024 * 1024
_ABOUT, _END, _FILES = "about.json", "end.json", "files/"
_FORMAT_1 = b"rollmesh backup\n"
_MEMBER_BYTES_MAX = 128 * 1024 * 1024
"""Maximum size of a member that is read whole. A part of a stream has at most `PART_BYTES` and one record."""
_HASH_BYTES = 32


class BackupAbout(msgspec.Struct, frozen=True, kw_only=True):
    """What the backup is of."""

    format: int
    run: str
    created_unix_s: float
    config_yaml: str
    """The configuration without secrets."""
    origin_json: str
    """run.json of the run folder; empty for a mesh that was reached over the network."""
    base_dir: str
    """Folder of the files that the configuration names."""


class StreamPart(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive records of a stream of the run. Every stream has at least one part, which may be empty."""

    kind: Kind
    first_seq: int
    """Sequence of the stream's first record, or of the next one if it has no records."""
    records: list[StreamRecord]


class FilePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a file of the run folder."""

    path: str
    """Relative to the run folder."""
    offset: int
    data: bytes


class End(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a complete backup."""

    head: LedgerHead
    sha256: str


class SegmentPart(msgspec.Struct, frozen=True, kw_only=True):
    """An archive segment, before the parts of its file."""

    begin: LedgerHead
    """Head of the ledger before its first record."""
    end: LedgerHead


Part = BackupAbout | StreamPart | FilePart | SegmentPart | End


class BackupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup contains."""

    run: str
    created_unix_s: float
    position: int
    """Position of the last record of the ledger."""
    first_position: int
    """Position of its first record that is not in an archive segment."""
    hash: str
    """Its hash, as `rollmesh audit --head POSITION:HASH` takes it."""
    num_records: dict[str, int]
    num_files: int
    num_bytes: int
    digest: str


class BackupWriter:
    """Writes a file that gets its name when it is complete. Use it as a context manager, and call `finish`."""

    def __init__(self, path: Path) -> None:
        """Raises AlreadyExists."""
        if path.exists():
            raise AlreadyExists(
                f"{path} exists; a backup never overwrites a file, so choose another name", path=str(path)
            )
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial")
        self._file: IO[bytes] | None = None
        self._ledger = _LedgerCheck(path)

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as err:
            raise ConfigError(
                f"{self._path}: cannot be written: {err.strerror}; choose another file", path=str(self._path)
            ) from err
        self._file = os.fdopen(descriptor, "wb")
        self._tar = tarfile.open(fileobj=self._file, mode="w")
        return self

    @property
    def ledger_first(self) -> int:
        """Sequence of the first ledger record that was added; 1 if none was."""
        return self._ledger.first

    @property
    def sealed(self) -> dict[int, ArchiveSealed]:
        """The archive segments that the ledger records name that were added, by number."""
        return self._ledger.sealed

    def add(self, part: BackupAbout | StreamPart) -> None:
        """Write a part. Raises DataLoss for a ledger record that does not follow the one before, DiskFull."""
        if isinstance(part, BackupAbout):
            self._add(_ABOUT, msgspec.json.encode(part))
        else:
            self._ledger.enter(part)
            self._add(f"{part.kind}/{part.records[0].seq if part.records else 0}.msgpack", msgspec.msgpack.encode(part))

    def add_file(self, name: str, file: IO[bytes]) -> int:
        """Copy an open file of the run folder, and return its size. What is appended meanwhile is not copied. Raises
        DataLoss."""
        member = tarfile.TarInfo(_FILES + name)
        member.size, member.mode = os.fstat(file.fileno()).st_size, 0o600
        try:
            with disk_full_errors(self._path.parent):
                self._tar.addfile(member, file)
        except OSError as err:
            if err.errno is not None:
                raise
            # tarfile raises an OSError without a number if the file ends before the size that its header states.
            raise DataLoss(f"{name} became shorter while it was copied; repeat the backup", path=name) from err
        return member.size

    def finish(self) -> None:
        """Write the end, and give the file its name."""
        assert self._file is not None
        with disk_full_errors(self._path.parent):
            self._file.flush()
            self._add(
                _END, msgspec.json.encode(End(head=self._ledger.head, sha256=_sha256(self._partial, self._file.tell())))
            )
            self._tar.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._partial.rename(self._path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        self._partial.unlink(missing_ok=True)

    def _add(self, name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size, member.mode = len(data), 0o600
        with disk_full_errors(self._path.parent):
            self._tar.addfile(member, io.BytesIO(data))


def read_backup(path: Path) -> Iterator[Part]:
    """Yield the parts of a file. Raises DataLoss if it is damaged or cut off, ConfigError if it is not a backup of this
    format."""
    at, is_archive = 0, False
    try:
        with path.open("rb") as file:
            if file.read(len(_FORMAT_1)) == _FORMAT_1:
                raise ConfigError(
                    f"{path} has format 1, and this version reads format {FORMAT}; restore it with the "
                    "version that wrote it, resume the run with this version, and back it up again"
                )
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                is_archive, ledger = True, _LedgerCheck(path)
                while (member := tar.next()) is not None:
                    at = member.offset
                    part = None
                    for part in _parts(path, member, tar):
                        if isinstance(part, StreamPart | SegmentPart):
                            ledger.enter(part)
                        yield part
                    if (part is None) or (at == 0) != isinstance(part, BackupAbout):
                        raise _damaged(path, at)
                    if isinstance(part, End):
                        if part != End(head=ledger.head, sha256=_sha256(path, at)) or not _is_last(file, member):
                            raise _damaged(path, at)
                        ledger.finish()
                        return
                    tar.members = []  # type: ignore[attr-defined]  # nothing reads the list of all members
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read: {err.strerror}", path=str(path)) from err
    except (tarfile.TarError, ValueError, OverflowError, *UNDECODABLE) as err:
        if not is_archive:
            raise ConfigError(f"{path} is not a file of `rollmesh backup`", path=str(path)) from err
        raise _damaged(path, at) from err
    raise _damaged(path, path.stat().st_size)  # tarfile ends at a header that it cannot read


def _parts(path: Path, member: tarfile.TarInfo, tar: tarfile.TarFile) -> Iterator[Part]:
    """Yield what a member contains; nothing for a member that a backup does not have. A sparse file can state any size,
    and no backup has one."""
    file = tar.extractfile(member) if member.isreg() and not member.issparse() else None
    if file is None:
        return
    if member.name.startswith(_FILES):
        if member.name.startswith(f"{_FILES}{ARCHIVE}/"):
            index = check_segment(cast(BinaryIO, file), f"{path}: {member.name}")
            yield SegmentPart(begin=index.begin, end=index.end)
            file.seek(0)
        yield from _file_parts(member.name.removeprefix(_FILES), file)
    elif member.size <= _MEMBER_BYTES_MAX:
        if member.name == _ABOUT:
            about = msgspec.json.decode(file.read(), type=BackupAbout)
            if about.format not in FORMATS_READ:
                raise ConfigError(
                    f"{path} has format {about.format}, and this version reads format {FORMAT}; upgrade rollmesh"
                )
            yield about
        elif member.name == _END:
            yield msgspec.json.decode(file.read(), type=End)
        elif member.name.partition("/")[0] in KINDS:
            yield msgspec.msgpack.decode(file.read(), type=StreamPart)


def _file_parts(name: str, file: IO[bytes]) -> Iterator[FilePart]:
    if name in ("", ".") or name.startswith("/") or ".." in name.split("/"):
        raise ConfigError(f"the backup contains the file name {name!r}, which is outside of the run folder")
    yield FilePart(path=name, offset=0, data=file.read(PART_BYTES))
    while data := file.read(PART_BYTES):
        yield FilePart(path=name, offset=file.tell() - len(data), data=data)


def _sha256(path: Path, size: int) -> str:
    """Return the SHA-256 of the first bytes of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while size and (data := file.read(min(size, PART_BYTES))):
            digest.update(data)
            size -= len(data)
    return digest.hexdigest()


def _is_last(file: IO[bytes], member: tarfile.TarInfo) -> bool:
    """Return whether only the end of a tar archive follows the member."""
    file.seek(member.offset_data + member.size)
    rest = file.read(2 * tarfile.RECORDSIZE)
    return (
        not any(rest)
        and len(rest) >= 2 * tarfile.BLOCKSIZE
        and not file.read(1)
        and file.tell() % tarfile.RECORDSIZE == 0
    )


def verify_backup(path: Path) -> tuple[BackupAbout, BackupSummary]:
    """Read a whole file. Raises as `read_backup`."""
    about: BackupAbout | None = None
    end: End | None = None
    records: Counter[str] = Counter()
    files, first_position = set(), 1
    for part in read_backup(path):
        match part:
            case BackupAbout():
                about = part
            case StreamPart():
                records[part.kind] += len(part.records)
                if part.kind == "ledger":
                    first_position = part.first_seq
            case FilePart():
                files.add(part.path)
            case End():
                end = part
                records["ledger"] = part.head.position  # some may also be in segments
    assert about is not None, path
    assert end is not None, path
    return about, BackupSummary(
        run=about.run,
        created_unix_s=about.created_unix_s,
        position=end.head.position,
        first_position=first_position,
        hash=end.head.hash,
        num_records={kind: records[kind] for kind in KINDS},
        num_files=len(files),
        num_bytes=path.stat().st_size,
        digest=end.sha256,
    )


class _LedgerCheck:
    """The chain of the ledger over its parts and archive segments."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.head = EMPTY
        """Head after the records of the stream so far."""
        self._begin: LedgerHead | None = None
        """Head before the first record of the stream."""
        self._hashes = bytearray()
        """Hashes of the records of the stream so far."""
        self.sealed: dict[int, ArchiveSealed] = {}
        """The segments that these records name, by number."""
        self._archived = EMPTY
        """Head after the segments so far."""

    @property
    def first(self) -> int:
        """Sequence of the first record of the stream; 1 without one."""
        return self._begin.position + 1 if self._begin is not None else 1

    def enter(self, part: StreamPart | SegmentPart) -> None:
        """Raise DataLoss for a record or a segment that does not follow the one before."""
        if isinstance(part, SegmentPart):
            if part.begin != self._archived:
                self._raise_gap()
            self._archived = part.end
        elif part.kind == "ledger":
            for record in part.records:
                if self._begin is None:
                    message = read_record(record.payload, self._path.name, record.seq)
                    self._begin = LedgerHead(position=record.seq - 1, hash=message.previous.hex())
                    self.head = self._begin
                stored = check_record(str(self._path), record, self.head)
                self.head = stored.head
                self._hashes += bytes.fromhex(stored.hash)
                self.sealed.update({fact.number: fact for fact in stored.facts if isinstance(fact, ArchiveSealed)})

    def finish(self) -> None:
        """Raise DataLoss if the records of the stream do not follow the segments. Records may be in both: those of a
        segment that was sealed while the stream was copied."""
        if self._begin is not None and self._archived != self._head_at(self._begin, self._archived.position):
            self._raise_gap()

    def _head_at(self, begin: LedgerHead, position: int) -> LedgerHead:
        at = (position - begin.position) * _HASH_BYTES
        if not 0 < at <= len(self._hashes):
            return begin
        return LedgerHead(position=position, hash=self._hashes[at - _HASH_BYTES : at].hex())

    def _raise_gap(self) -> NoReturn:
        raise DataLoss(
            f"{self._path} lacks an archive segment: records after {self._archived.position} do not follow; use "
            "another backup",
            path=str(self._path),
        )


def _damaged(path: Path, at: int) -> DataLoss:
    return DataLoss(f"{path} is damaged or cut off at byte {at}; use another backup", path=str(path))
