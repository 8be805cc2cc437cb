"""Send the output of a Python command while it runs: its own writes by line, those of its children when a timer finds
them.

Only retained output is sent, so the output limits bound it. A frame must never be interrupted: while the main thread is
`sending`, the interpreter does not raise a time limit but sets `missed`, and the write raises it when it is done. A
fork of the program that prints sends nothing.
"""

from __future__ import annotations

import codecs
import os
from _thread import allocate_lock, get_ident
from collections.abc import Callable

from rollmesh.sandbox_runtime.output import Emit

TICK_S = 0.05
"""Maximum delay of the output of children, in seconds."""
_LINE_CHARS_MAX = 4096


class LiveOutput:
    """Live output of one command."""

    def __init__(self, emit: Emit, keep: int, interrupt: Callable[[], None]) -> None:
        """`interrupt` raises the time limit that was `missed`."""
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
        """Whether the main thread is sending or about to."""
        self.missed = False
        """Whether its time was up while it was sending."""

    def add(self, fd: int, text: str) -> None:
        """Add the retained part of a write of the program itself."""
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
        """Send all pending output unless another thread is sending. The timer calls this."""
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
        """Send the rest. After this nothing is sent, even if a thread still prints."""
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
        """Return what was added to the descriptor's file since the last call."""
        try:
            raw = os.pread(fd, self._keep - self._offsets[fd], self._offsets[fd])
        except OSError:  # the program closed or replaced the file
            return ""
        self._offsets[fd] += len(raw)
        return self._decoders[fd].decode(raw)
