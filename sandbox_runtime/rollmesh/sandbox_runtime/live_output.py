"""What a Python command prints, sent on while it runs: its own writes by line, its children's as a timer finds them.

Only what is kept anyway is sent, so the limits on output bound it. A frame must never be torn: while the main thread is `sending`, the
interpreter does not raise a time limit there but marks it as `missed`, for the write to raise when it is done; and a fork of the program that
prints sends nothing.
"""

from __future__ import annotations

import codecs
import os
from _thread import allocate_lock, get_ident
from collections.abc import Callable

from rollmesh.sandbox_runtime.output import Emit

TICK_S = 0.05
"""How late what children print may be sent."""
_LINE_CHARS_MAX = 4096


class LiveOutput:
    """For the length of one command."""

    def __init__(self, emit: Emit, keep: int, interrupt: Callable[[], None]) -> None:
        """`interrupt` raises what was `missed`."""
        self._emit = emit
        self._keep = keep
        self._lock = allocate_lock()
        self._main = get_ident()
        self._pid = os.getpid()
        self._open = True
        self._interrupt = interrupt
        self._lines: dict[int, list[str]] = {1: [], 2: []}
        self._num_chars = {1: 0, 2: 0}
        self._offsets = {1: 0, 2: 0}
        self._decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in (1, 2)}
        self.sending = False
        """Whether the main thread is sending, or about to."""
        self.missed = False
        """Whether its time was up while it was inside."""

    def add(self, fd: int, text: str) -> None:
        """A write of the program's own, as far as it is kept."""
        main = get_ident() == self._main
        self.sending = self.sending or main
        try:
            with self._lock:
                self._lines[fd].append(text)
                self._num_chars[fd] += len(text)
                if "\n" in text or self._num_chars[fd] > _LINE_CHARS_MAX:
                    self._send(fd)
        finally:
            if main:
                self.sending = False
        if main and self.missed:
            self._interrupt()

    def tick(self) -> None:
        """From the timer: send all there is, unless somebody is sending."""
        self.sending = True
        try:
            if self._lock.acquire(blocking=False):
                try:
                    for fd in (1, 2):
                        self._send(fd)
                finally:
                    self._lock.release()
        finally:
            self.sending = False

    def end(self) -> None:
        """Send the rest; nothing is sent from here on, whatever thread may still print."""
        with self._lock:
            for fd in (1, 2):
                self._send(fd)
            self._open = False

    def _send(self, fd: int) -> None:
        text = self._from_children(fd) + "".join(self._lines[fd])
        self._lines[fd], self._num_chars[fd] = [], 0
        if text and self._open and os.getpid() == self._pid:
            self._emit(fd, text)

    def _from_children(self, fd: int) -> str:
        """What has come to the descriptor's file since the last look."""
        try:
            raw = os.pread(fd, self._keep - self._offsets[fd], self._offsets[fd])
        except OSError:  # the program closed or replaced it
            return ""
        self._offsets[fd] += len(raw)
        return self._decoders[fd].decode(raw)
