"""Payloads of one run in append-only files of one host: written by its rollout workers, read by position.

    FOLDER/00004096.payloads       one writer each, whole records: header (magic, position, length, CRC-32), then the payload

The position of a record is a sequence at or above `FIRST_SEQUENCE`: the number of its file, then its offset in it. A sequence of a stream
never gets there, so both kinds fit the same field, and a position names nothing but a record of this run.

A writer locks its file until it begins the next one or exits, so a file without a lock is complete. `append` returns after write(2): the
record survives the kill of every process, and a lost host may lose it, as with an ack of JetStream. A record that a kill cut off has no
position that a report names. Every read compares header, length and CRC.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rollmesh.shared.bus.bus import StreamFull, UnknownStream
from rollmesh.shared.disk import free_bytes, is_disk_full
from rollmesh.shared.errors import DataLoss, PayloadTooLarge

FIRST_SEQUENCE = 1 << 40
"""Lowest position of a record in a file. A stream would need 10^12 records to reach it."""
RECORD_BYTES_MAX = 8 * 1024 * 1024
"""Maximum size of a payload, as NATS advises for a record."""
FILE_BYTES_MAX = 16 * 1024 * 1024
FILE_BYTES_MIN = 64 * 1024
FILES_PER_LIMIT = 16
"""A writer begins its next file at this share of the limit, so that files without live payloads free most of it."""
_OFFSET_BITS = 28
_FIRST_FILE = FIRST_SEQUENCE >> _OFFSET_BITS
_NAME = re.compile(r"(\d{8,12})\.payloads")
_MAGIC = b"RMP1"
_HEADER = struct.Struct("<4sQII")
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class UnreadableRecord(DataLoss):
    """A position does not hold a whole record: the file is damaged or gone, or the position was invented."""

    reason = "UNREADABLE_RECORD"


class NoPayloadFile(UnreadableRecord):
    """The file of a position does not exist: its payloads were purged, or the position was invented."""

    reason = "NO_PAYLOAD_FILE"


def in_file(sequence: int) -> bool:
    """Return whether a payload's sequence is a position in a file."""
    return sequence >= FIRST_SEQUENCE


def file_of(sequence: int) -> int:
    """Return the number of the file that a position names."""
    return sequence >> _OFFSET_BITS


class PayloadFiles:
    """The files of one run. Every method blocks for as long as the disk does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, sequence: int) -> bytes:
        """Return a payload. Raises UnreadableRecord."""
        payload = self._read(sequence, 0)
        assert payload is not None, "only a read that must not wait returns nothing"
        return payload

    def read_cached(self, sequence: int) -> bytes | None:
        """Return a payload that the kernel has in memory, without waiting for the disk; else None. Raises UnreadableRecord."""
        return self._read(sequence, os.RWF_NOWAIT)

    def _read(self, sequence: int, flags: int) -> bytes | None:
        number, offset = file_of(sequence), sequence & ((1 << _OFFSET_BITS) - 1)
        path = self._path(number)
        try:
            descriptor = os.open(path, os.O_RDONLY | _OPEN)
        except FileNotFoundError as error:
            raise NoPayloadFile(f"payload {sequence} is lost: {path} does not exist; drop its samples") from error
        except OSError as error:
            raise _unreadable(sequence, path, f"cannot open it: {error.strerror}") from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _unreadable(sequence, path, "it is not a file")
            return _record(descriptor, sequence, offset, path, flags)
        except OSError as error:
            if flags and error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL):
                return None
            raise _unreadable(sequence, path, f"cannot read it: {error.strerror}") from error
        finally:
            os.close(descriptor)

    def sizes(self) -> dict[int, int]:
        """Return the sizes of all files by number, in bytes; empty without a folder."""
        found = {}
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if match := _NAME.fullmatch(entry.name):
                    with suppress(FileNotFoundError):  # removed meanwhile
                        found[int(match[1])] = entry.stat(follow_symlinks=False).st_size
        return found

    def is_open(self, number: int) -> bool:
        """Return whether a writer still appends to a file."""
        try:
            descriptor = os.open(self._path(number), os.O_RDONLY | _OPEN)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

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

    def remove_all(self) -> None:
        """Remove the folder. Idempotent."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:08d}.payloads"

    def create(self) -> tuple[int, int]:
        """Create the next file, and return its number and its locked descriptor. Raises UnknownStream without a folder."""
        number = max(self.sizes(), default=_FIRST_FILE - 1) + 1
        while True:
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN
                descriptor = os.open(self._path(number), flags, 0o600)
            except FileExistsError:  # another writer has taken it
                number += 1
                continue
            except FileNotFoundError as error:
                raise UnknownStream(
                    f"{self.folder} does not exist: its run was deleted", stream=self.folder.name
                ) from error
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return number, descriptor


class PayloadWriter:
    """Append to files that no other writer has. One thread at a time calls it."""

    def __init__(self, files: PayloadFiles, *, bytes_max: int) -> None:
        """`bytes_max` is the limit of all files of the run together. Writers that append at once may exceed it by one call each."""
        self._files = files
        self._bytes_max = bytes_max
        self._file_bytes = min(FILE_BYTES_MAX, max(FILE_BYTES_MIN, bytes_max // FILES_PER_LIMIT))
        self._number, self._descriptor, self._end = 0, -1, 0

    def append(self, payloads: Sequence[bytes]) -> list[int]:
        """Store payloads and return their positions. Raises StreamFull, also for a full disk, and PayloadTooLarge; then it has stored none."""
        for payload in payloads:
            if len(payload) > RECORD_BYTES_MAX:
                raise PayloadTooLarge(
                    f"a payload of {len(payload)} bytes exceeds the {RECORD_BYTES_MAX} of a record; use shorter episodes"
                )
        self._make_room(sum(len(payload) + _HEADER.size for payload in payloads))
        self._continue_file()
        records, positions, at = [], [], self._end
        for payload in payloads:
            positions.append((self._number << _OFFSET_BITS) + at)
            records += [_header(positions[-1], payload), payload]
            at += _HEADER.size + len(payload)
        try:
            _write(self._descriptor, records, self._end)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            if not is_disk_full(error):
                raise
            raise StreamFull(
                f"{self._files.folder}: no space left on the device ({free_bytes(self._files.folder) >> 20} MiB free); free some, "
                "e.g. by `rollmesh clean`"
            ) from error
        self._end = at
        return positions

    def release(self) -> None:
        """Complete the current file. The next append begins another. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _make_room(self, num_bytes: int) -> None:
        held = sum(self._files.sizes().values())
        if held + num_bytes > self._bytes_max:
            self.release()  # this file can be removed as well, once none of its payloads is live
            raise StreamFull(
                f"{self._files.folder} is full: its payload files have {held} bytes, the limit is {self._bytes_max} "
                "(coordinator.streams.samples_bytes_max); wait until samples are trained, or raise the limit"
            )

    def _continue_file(self) -> None:
        """Have a file with room that still has its name: a run that ended or was deleted loses its files."""
        if self._descriptor >= 0 and (self._end >= self._file_bytes or not os.fstat(self._descriptor).st_nlink):
            self.release()
        if self._descriptor < 0:
            (self._number, self._descriptor), self._end = self._files.create(), 0


def _header(position: int, payload: bytes) -> bytes:
    return _HEADER.pack(_MAGIC, position, len(payload), zlib.crc32(payload))


def _write(descriptor: int, parts: list[bytes], offset: int) -> None:
    """Write all parts, also where the kernel writes fewer bytes at once."""
    for at in range(0, len(parts), 512):  # the kernel accepts 1024 parts
        some = parts[at : at + 512]
        total = sum(len(part) for part in some)
        written = os.pwritev(descriptor, some, offset)
        if written < total:
            rest = memoryview(b"".join(some))
            while written < total:
                written += os.pwrite(descriptor, rest[written:], offset + written)
        offset += total


def _record(descriptor: int, sequence: int, offset: int, path: Path, flags: int) -> bytes | None:
    header = bytearray(_HEADER.size)
    if os.preadv(descriptor, [header], offset, flags) < _HEADER.size:
        raise _unreadable(sequence, path, f"it ends before offset {offset}")
    magic, position, length, checksum = _HEADER.unpack(header)
    if magic != _MAGIC or position != sequence or length > RECORD_BYTES_MAX:
        raise _unreadable(sequence, path, f"no record begins at offset {offset}")
    if flags:
        cached = bytearray(length)
        if os.preadv(descriptor, [cached], offset + _HEADER.size, flags) < length:  # the rest may not be in memory
            return None
        payload = bytes(cached)
    else:
        payload = os.pread(descriptor, length, offset + _HEADER.size)
    if len(payload) < length:
        raise _unreadable(sequence, path, f"the record at offset {offset} has {len(payload)} of {length} bytes")
    if zlib.crc32(payload) != checksum:
        raise _unreadable(sequence, path, f"the record at offset {offset} has another checksum than its header")
    return payload


def _unreadable(sequence: int, path: Path, why: str) -> UnreadableRecord:
    return UnreadableRecord(f"payload {sequence} cannot be read from {path}: {why}; drop its samples")
