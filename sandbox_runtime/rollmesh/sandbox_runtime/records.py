"""Streams of unknown length over a session's socket: sections of length-prefixed records.

Every record except a section's last is exactly `RECORD_BYTES` long, so a shorter one, possibly empty, ends its section.
This rule protects the service: data from a jail is hostile, and a flood of tiny records would cost far more than their
bytes. A writer that cannot continue sends `ABORT` instead of a length. The service stores the records of a snapshot
unchanged and sends them back unchanged.
"""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable

from rollmesh.sandbox_runtime import framing

LENGTH = framing.LENGTH
RECORD_BYTES = 1 << 18
ABORT = 0xFFFFFFFF


class TooLarge(Exception):
    """The written data exceeds the reader's limit."""


class RecordWriter:
    """A writable file of sections, at most `bytes_max` bytes in total; `send` gets the records."""

    def __init__(self, send: Callable[[bytes], object], bytes_max: int) -> None:
        self._send = send
        self._room = bytes_max
        self._pending = bytearray()
        self._pid = os.getpid()

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        start = 0
        while start < len(view):
            piece = view[start : start + RECORD_BYTES - len(self._pending)]
            self._pending += piece
            start += len(piece)
            if len(self._pending) == RECORD_BYTES:
                self._flush()
        return len(view)

    def end_section(self) -> None:
        """End the section with a record that is shorter than the others."""
        self._flush()

    def abort(self) -> None:
        """Abort the stream; a reply with the reason follows."""
        self._send(LENGTH.pack(ABORT))

    def _flush(self) -> None:
        if os.getpid() != self._pid:
            os._exit(1)  # a child that foreign code forked during pickling
        self._room -= LENGTH.size + len(self._pending)
        if self._room < 0:
            raise TooLarge
        self._send(LENGTH.pack(len(self._pending)) + self._pending)
        self._pending.clear()


class SectionReader(io.RawIOBase):
    """Reader of one section in the jail. The service has checked the framing. Raises EOFError if the service is
    gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = 0
        self._last = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        if not self._left and not self._next_record():
            return 0
        view = memoryview(buffer).cast("B")
        num_bytes = self._connection.recv_into(view, min(self._left, len(view)))
        if not num_bytes:
            raise EOFError("the service is gone")
        self._left -= num_bytes
        return num_bytes

    def skip(self) -> None:
        """Read to the end of the section, so that the next data on the socket follows it."""
        waste = bytearray(RECORD_BYTES)
        while self.readinto(waste):
            pass

    def _next_record(self) -> bool:
        if self._last:
            return False
        header = framing.receive_exactly(self._connection, LENGTH.size)
        if header is None:
            raise EOFError("the service is gone")
        (self._left,) = LENGTH.unpack(header)
        self._last = self._left < RECORD_BYTES
        return self._left > 0
