"""Payloads of one run in append-only files of one host, read by position. `bus/payload_writer` appends.

    FOLDER/00004096.payloads       one writer each, whole records: header (magic, position, length, CRC-32), then the payload

The position of a record is a sequence at or above `FIRST_SEQUENCE`: the number of its file, then its offset in it. A
sequence of a stream never gets there, so both kinds fit the same field, and a position names nothing but a record of
this run.

    FOLDER/kept/00004096.payloads  a removed file, or a copy with some of its payloads, at the same positions, and holes
    FOLDER/replay/1099511627776    the record of that position, for the replay log of the run

Every read compares header, length and CRC, so a record that was cut off or damaged is never returned.
"""  # noqa: E501, W505

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import struct
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from rollmesh.shared.domain.formats import check_format
from rollmesh.shared.errors import DataLoss, NotFound
from rollmesh.shared.store.disk import disk_full_errors
from rollmesh.shared.store.whole_files import write_whole

FIRST_SEQUENCE = 1 << 40
"""Lowest position of a record in a file. A stream would need 10^12 records to reach it."""
RECORD_BYTES_MAX = 8 * 1024 * 1024
"""Maximum size of a payload, as NATS advises for a record."""
OFFSET_BITS = 28
_FIRST_FILE = FIRST_SEQUENCE >> OFFSET_BITS
_KEPT = "kept"
REPLAY = "replay"
_BLOCK_BYTES = 512
"""Unit of `st_blocks`."""
_NAME = re.compile(r"(\d{8,12})\.payloads")
FORMAT = 1
"""Format of the records, the digit at the end of their magic."""
_MAGIC = b"RMP%d" % FORMAT
HEADER = struct.Struct("<4sQII")
_NO_LINKS = frozenset((errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES))
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class UnreadableRecord(DataLoss):
    """A position does not hold a whole record: the file is damaged, or the position was invented."""

    reason = "UNREADABLE_RECORD"


class NoPayloadFile(NotFound):
    """The file of a position does not exist: its payloads were purged, or the position was invented."""

    reason = "NO_PAYLOAD_FILE"


def in_file(sequence: int) -> bool:
    """Return whether a payload's sequence is a position in a file."""
    return sequence >= FIRST_SEQUENCE


def file_of(sequence: int) -> int:
    """Return the number of the file that a position names."""
    return sequence >> OFFSET_BITS


def record_header(position: int, payload: bytes) -> bytes:
    """Return the bytes before a payload that is stored at `position`."""
    return HEADER.pack(_MAGIC, position, len(payload), zlib.crc32(payload))


class PayloadFiles:
    """The files of one run. Every method blocks for as long as the disk does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, sequence: int) -> bytes:
        """Return a payload, also a kept one. Raises NoPayloadFile, UnreadableRecord, NewerFormat."""
        path, descriptor = self._open(sequence)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _unreadable(sequence, path, "it is not a file")
            if path.parent.name == _KEPT and _is_hole(descriptor, sequence):
                raise NoPayloadFile(f"payload {sequence} is purged: {path} has others of its file")
            return _record(descriptor, sequence, path, 0 if path.parent.name == REPLAY else _offset(sequence))
        except OSError as error:
            raise _unreadable(sequence, path, f"cannot read it: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def _open(self, sequence: int) -> tuple[Path, int]:
        """Return the file that has a payload, and its descriptor."""
        paths = (self._path(file_of(sequence)), self._held(sequence), self._kept(file_of(sequence)))
        for path in paths:
            try:
                return path, os.open(path, os.O_RDONLY | _OPEN)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _unreadable(sequence, path, f"cannot open it: {error.strerror}") from error
        raise NoPayloadFile(f"payload {sequence} is purged or lost: {paths[0]} does not exist")

    def sizes(self) -> dict[int, int]:
        """Return the sizes of all files by number, in bytes; empty without a folder."""
        found = {}
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if match := _NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        found[int(match[1])] = entry.stat(follow_symlinks=False).st_size
        return found

    def create(self) -> tuple[int, int]:
        """Create the next file, and return its number and descriptor. Raises FileNotFoundError without a folder."""
        number = max(self.sizes(), default=_FIRST_FILE - 1) + 1
        while True:
            try:
                return number, os.open(self._path(number), os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, 0o600)
            except FileExistsError:  # another writer has taken it
                number += 1

    def remove(self, number: int) -> None:
        """Remove a file. A writer of it notices and begins another. Idempotent.

        An empty file takes the place of the newest one, because a number must not be used again.
        """
        sizes = self.sizes()
        if number == max(sizes, default=0):
            if not sizes[number]:
                return
            os.close(self.create()[1])
        self._path(number).unlink(missing_ok=True)

    def hold(self, sequence: int) -> None:
        """Copy a payload for the replay log, so that its file can be removed. Idempotent. Raises as `read`, OSError,
        DiskFull."""
        path = self._held(sequence)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.exists():
            return
        payload = self.read(sequence)
        with disk_full_errors(path.parent):
            write_whole(path, record_header(sequence, payload) + payload)

    def release(self, needed: Collection[int]) -> None:
        """Remove the copies that the replay log does not need. Idempotent."""
        with suppress(FileNotFoundError), os.scandir(self._held(0).parent) as entries:
            for entry in entries:
                if not (entry.name.isdigit() and int(entry.name) in needed):
                    os.unlink(entry.path)

    def keep(self, number: int, wanted: Callable[[bytes], bool] | None = None, *, may_link: bool = True) -> None:
        """Keep the wanted payloads of a file. Then it can be removed. Idempotent.

        Without `wanted`, the kept file is another name of the file, without a copy, if the file system has hard links
        and `may_link` allows it.
        """
        path = self._kept(number)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if wanted is None and may_link and self._link(number):
            return
        partial, num = path.with_suffix(".partial"), 0
        try:
            with (
                disk_full_errors(path.parent),
                open(self._path(number), "rb", opener=_opener) as source,
                open(partial, "wb", opener=_opener) as copy,
            ):
                for offset, record in _records(source, number):
                    if wanted is None or wanted(record[HEADER.size :]):
                        copy.seek(offset)
                        num += copy.write(record)
            if num:
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def has_name(self, number: int, descriptor: int) -> bool:
        """Return whether an open file is still the file of this number. A removed one may have a kept name."""
        try:
            return os.path.samestat(os.stat(self._path(number)), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def limit_kept(self, bytes_max: int) -> None:
        """Remove the oldest kept files until the others use at most `bytes_max` of the disk."""
        used = 0
        for path in sorted(self._kept(0).parent.glob("*.payloads"), reverse=True):
            used += path.stat().st_blocks * _BLOCK_BYTES
            if used > bytes_max:
                path.unlink()

    def remove_all(self) -> None:
        """Remove the folder. Idempotent."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder)

    def _link(self, number: int) -> bool:
        """Give a file its kept name. Return False if the file system has no hard links between the two folders."""
        try:
            os.link(self._path(number), self._kept(number), follow_symlinks=False)
        except FileExistsError:
            return True
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        return True

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.payloads"

    def _held(self, sequence: int) -> Path:
        return self.folder / REPLAY / str(sequence)

    def _kept(self, number: int) -> Path:
        return self.folder / _KEPT / f"{number:08d}.payloads"


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | _OPEN, 0o600)


def _records(file: BinaryIO, number: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, record) up to the first one that is not whole, which its writer did not report."""
    offset = 0
    while len(header := file.read(HEADER.size)) == HEADER.size:
        magic, position, length, checksum = HEADER.unpack(header)
        if magic != _MAGIC or position != (number << OFFSET_BITS) + offset or length > RECORD_BYTES_MAX:
            return
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield offset, header + payload
        offset += len(header) + length


def _offset(sequence: int) -> int:
    """Return the offset of a position in its file."""
    return sequence & ((1 << OFFSET_BITS) - 1)


def _is_hole(descriptor: int, sequence: int) -> bool:
    """Return whether a copy has nothing at a position: a payload that was not kept."""
    header = os.pread(descriptor, HEADER.size, _offset(sequence))
    return not any(header)


def _record(descriptor: int, sequence: int, path: Path, offset: int) -> bytes:
    header = os.pread(descriptor, HEADER.size, offset)
    if len(header) < HEADER.size:
        raise _unreadable(sequence, path, f"it ends before offset {offset}")
    magic, position, length, checksum = HEADER.unpack(header)
    if magic[:3] == _MAGIC[:3] and magic[3:].isdigit():
        check_format(f"payload {sequence} in {path}", int(magic[3:]), FORMAT)
    if magic != _MAGIC or position != sequence or length > RECORD_BYTES_MAX:
        raise _unreadable(sequence, path, f"no record begins at offset {offset}")
    payload = os.pread(descriptor, length, offset + HEADER.size)
    if len(payload) < length:
        raise _unreadable(sequence, path, f"the record at offset {offset} has {len(payload)} of {length} bytes")
    if zlib.crc32(payload) != checksum:
        raise _unreadable(sequence, path, f"the record at offset {offset} has another checksum than its header")
    return payload


def _unreadable(sequence: int, path: Path, why: str) -> UnreadableRecord:
    return UnreadableRecord(f"payload {sequence} cannot be read from {path}: {why}; drop its samples")
