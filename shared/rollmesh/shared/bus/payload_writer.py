"""Append the payloads of one process to separate files (`payload_files`).

`append` returns after write(2): the record survives the kill of every process, and a lost host may lose it, as with an
ack of JetStream. The position is returned after that, so a report never names a record that a kill cut off.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from rollmesh.shared.bus.bus import StreamFull, UnknownStream
from rollmesh.shared.errors import PayloadTooLarge
from rollmesh.shared.store.disk import disk_full_errors
from rollmesh.shared.store.payload_files import HEADER, OFFSET_BITS, RECORD_BYTES_MAX, PayloadFiles, record_header

FILE_BYTES_MAX = 16 * 1024 * 1024
FILE_BYTES_MIN = 64 * 1024
FILES_PER_LIMIT = 16
"""A writer begins its next file at this share of the limit, so that files without live payloads free most of it."""


class PayloadWriter:
    """Append to files that no other writer has. One thread at a time calls it."""

    def __init__(self, files: PayloadFiles, *, bytes_max: int) -> None:
        """`bytes_max` is the limit of all files of the run together. Writers that append at once may exceed it by one
        call each."""
        self._files = files
        self._bytes_max = bytes_max
        self._file_bytes = min(FILE_BYTES_MAX, max(FILE_BYTES_MIN, bytes_max // FILES_PER_LIMIT))
        self._number, self._descriptor, self._end = 0, -1, 0

    def append(self, payloads: Sequence[bytes]) -> list[int]:
        """Store payloads and return their positions. Raises StreamFull, DiskFull, PayloadTooLarge, UnknownStream; then
        it has stored none."""
        for payload in payloads:
            if len(payload) > RECORD_BYTES_MAX:
                raise PayloadTooLarge(
                    f"a payload of {len(payload)} bytes exceeds the {RECORD_BYTES_MAX} of a record; use shorter "
                    "episodes"
                )
        self._check_room(sum(len(payload) + HEADER.size for payload in payloads))
        with disk_full_errors(self._files.folder):
            self._continue_file()
            records, positions, at = [], [], self._end
            for payload in payloads:
                positions.append((self._number << OFFSET_BITS) + at)
                records += [record_header(positions[-1], payload), payload]
                at += HEADER.size + len(payload)
            try:
                self._write(b"".join(records))
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._end)
                raise
        self._end = at
        return positions

    def close(self) -> None:
        """Close the current file. The next append begins another. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _check_room(self, num_bytes: int) -> None:
        held = sum(self._files.sizes().values())
        if held + num_bytes > self._bytes_max:
            raise StreamFull(
                f"{self._files.folder} is full: its payload files have {held} bytes, the limit is {self._bytes_max} "
                "(coordinator.streams.samples_bytes_max); wait until samples are trained, or raise the limit"
            )

    def _continue_file(self) -> None:
        """Have a file with room that still has its name: the coordinator removes files without live payloads."""
        if self._descriptor >= 0 and (
            self._end >= self._file_bytes or not self._files.has_name(self._number, self._descriptor)
        ):
            self.close()
        if self._descriptor < 0:
            try:
                (self._number, self._descriptor), self._end = self._files.create(), 0
            except FileNotFoundError as error:
                folder = self._files.folder
                raise UnknownStream(f"{folder} does not exist: its run was deleted", stream=folder.name) from error

    def _write(self, records: bytes) -> None:
        left, at = memoryview(records), self._end
        while left:
            written = os.pwrite(self._descriptor, left, at)
            left, at = left[written:], at + written
