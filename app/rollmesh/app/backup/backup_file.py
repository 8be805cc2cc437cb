"""The file of `rollmesh backup`: its frames, and a check of the whole file.

    magic, then frames: length (4 bytes, big endian) and msgpack
    BackupAbout  StreamBegin(samples) StoredRecord...  StreamBegin(ledger) ...  StreamBegin(dead) ...  FilePart...  End

`End` has the SHA-256 of all bytes before it. The ledger's hash chain is verified when the file is written and when it is read. The file
contains samples and no token, password or key.
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
from typing import IO, Literal, Self

import msgspec

from rollmesh.services.coordinator.ledger import check_record
from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead
from rollmesh.shared.errors import AlreadyExists, ConfigError, DataLoss
from rollmesh.shared.store.disk import disk_full_errors

Kind = Literal["samples", "ledger", "dead"]
KINDS: tuple[Kind, ...] = ("samples", "ledger", "dead")
FORMAT = 1
_MAGIC = b"rollmesh backup\n"
_LENGTH = struct.Struct(">I")
_FRAME_BYTES_MAX = 64 * 1024 * 1024


class BackupAbout(msgspec.Struct, frozen=True, kw_only=True, tag="about"):
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


class StreamBegin(msgspec.Struct, frozen=True, kw_only=True, tag="stream"):
    """A stream of the run. It precedes the records of its kind."""

    kind: Kind
    first_seq: int
    """Sequence of the first record, or of the next one if it has no records."""


class BackedUpRecord(msgspec.Struct, frozen=True, kw_only=True, tag="record"):
    """A record of a stream."""

    kind: Kind
    seq: int
    msg_id: str
    headers: dict[str, str]
    payload: bytes


class FilePart(msgspec.Struct, frozen=True, kw_only=True, tag="file"):
    """A part of a file of the run folder. A later part replaces an earlier one at the same offset."""

    path: str
    """Relative to the run folder."""
    offset: int
    data: bytes


class End(msgspec.Struct, frozen=True, kw_only=True, tag="end"):
    """The end of a complete backup."""

    head: LedgerHead
    digest: bytes


Frame = BackupAbout | StreamBegin | BackedUpRecord | FilePart | End


class BackupSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a backup contains."""

    run: str
    created_unix_s: float
    position: int
    """Position of the last record of the ledger."""
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
        self._hash = hashlib.sha256()
        self._file: BinaryIO | None = None
        self._head = EMPTY

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as err:
            raise ConfigError(
                f"{self._path}: cannot be written: {err.strerror}; choose another file", path=str(self._path)
            ) from err
        self._file = os.fdopen(descriptor, "wb")
        self._write(_MAGIC)
        return self

    def add(self, frame: Frame) -> None:
        """Write a frame. Raises DataLoss for a ledger record that does not follow the one before, DiskFull."""
        if isinstance(frame, BackedUpRecord) and frame.kind == "ledger":
            self._head = check_record(str(self._path), _stream_record(frame), self._head).head
        body = msgspec.msgpack.encode(frame)
        self._write(_LENGTH.pack(len(body)) + body)

    def finish(self) -> None:
        """Write the end, and give the file its name."""
        assert self._file is not None
        self.add(End(head=self._head, digest=self._hash.digest()))
        with disk_told(self._path.parent):
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

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        with disk_told(self._path.parent):
            self._file.write(data)
        self._hash.update(data)


def read_backup(path: Path) -> Iterator[Frame]:
    """Yield the frames of a file. Raises DataLoss if it is damaged or cut off, ConfigError if it is not a backup."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ConfigError(f"{path} is not a file of `rollmesh backup`", path=str(path))
            digest.update(_MAGIC)
            head, ended = EMPTY, False
            while raw := file.read(_LENGTH.size):
                at = file.tell()
                length = _LENGTH.unpack(raw)[0] if len(raw) == _LENGTH.size else 0
                body = file.read(length) if 0 < length <= _FRAME_BYTES_MAX else b""
                if ended or not body or len(body) < length:
                    raise _damaged(path, at)
                frame = _decode(path, at, body)
                if isinstance(frame, BackedUpRecord) and frame.kind == "ledger":
                    head = check_record(str(path), _stream_record(frame), head).head
                if isinstance(frame, End):
                    ended = True
                    if frame.digest != digest.digest() or frame.head != head:
                        raise _damaged(path, at)
                digest.update(raw + body)
                yield frame
            if not ended:
                raise _damaged(path, file.tell())
    except OSError as err:
        raise ConfigError(f"{path}: cannot be read: {err.strerror}", path=str(path)) from err


def verify_backup(path: Path) -> tuple[BackupAbout, BackupSummary]:
    """Read a whole file. Raises as `read_backup`, and ConfigError for a format of a later version."""
    about: BackupAbout | None = None
    end: End | None = None
    records: Counter[str] = Counter()
    files = set()
    for frame in read_backup(path):
        match frame:
            case BackupAbout():
                about = frame
                if frame.format > FORMAT:
                    raise ConfigError(
                        f"{path} has format {frame.format}, and this version reads up to {FORMAT}; upgrade rollmesh"
                    )
            case BackedUpRecord():
                records[frame.kind] += 1
            case FilePart():
                files.add(frame.path)
            case End():
                end = frame
            case StreamBegin():
                pass
    if about is None or end is None:
        raise _damaged(path, len(_MAGIC))
    return about, BackupSummary(
        run=about.run,
        created_unix_s=about.created_unix_s,
        position=end.head.position,
        hash=end.head.hash,
        num_records={kind: records[kind] for kind in KINDS},
        num_files=len(files),
        num_bytes=path.stat().st_size,
        digest=end.digest.hex(),
    )


def _decode(path: Path, at: int, body: bytes) -> Frame:
    try:
        found: Frame = msgspec.msgpack.decode(body, type=Frame)
    except UNDECODABLE as err:
        raise _damaged(path, at) from err
    return found


def _damaged(path: Path, at: int) -> DataLoss:
    return DataLoss(f"{path} is damaged or cut off at byte {at}; use another backup", path=str(path))


def _stream_record(frame: BackedUpRecord) -> StreamRecord:
    return StreamRecord(seq=frame.seq, payload=frame.payload, msg_id=frame.msg_id, headers=frame.headers)
