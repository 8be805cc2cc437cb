"""Bounded output of a command: a text stream for Python's own writes, files for writes to descriptors 1 and 2, and
captures of child processes. All retain the first bytes, count the rest, and may pass on the retained bytes while they
are printed."""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Callable

Emit = Callable[[int, str], None]
"""Callback that sends a piece of output of descriptor 1 or 2 before the reply."""


class OutputLimitError(BaseException):
    """The call printed more than the flood limit. A BaseException, so that `except Exception` in a print loop does not
    catch it."""


class BoundedText(io.TextIOBase):
    """Stream that retains the first `keep` characters, drops the rest, and raises above `flood` characters. `fileno` is
    the descriptor that it represents."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, fd: int, *, keep: int, flood: int) -> None:
        self._fd = fd
        self._keep = keep
        self._flood = flood
        self._parts: list[str] = []
        self._kept = 0
        self._seen = 0
        self._pid = os.getpid()
        self.emit: Emit | None = None
        """Called with the retained text as it is written."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        if os.getpid() != self._pid:  # in a fork of the program the text would be lost with its memory
            os.write(self._fd, text.encode("utf-8", "replace"))
            return len(text)
        self._seen += len(text)
        room = self._keep - self._kept
        if room > 0:
            piece = text[:room]
            self._parts.append(piece)
            self._kept += len(piece)
            if self.emit is not None:
                self.emit(self._fd, piece)
        if self._seen > self._flood:
            raise OutputLimitError(f"more than {self._flood} characters printed")
        return len(text)

    def take(self) -> tuple[str, bool]:
        """Return the text retained since the last call, including what child processes wrote to the descriptor, and
        whether any was cut."""
        text, seen = "".join(self._parts), self._seen
        self._parts, self._kept, self._seen = [], 0, 0
        raw, total = _take_file(self._fd, self._keep)
        text, cut = clip(text + raw.decode("utf-8", "replace"), self._keep)
        return text, cut or seen > self._keep or total > len(raw)


class Capture:
    """Captured bytes of one descriptor: retains the first `keep` as text and counts up to `flood`."""

    def __init__(self, fd: int, *, keep: int, flood: int, emit: Emit | None = None) -> None:
        self._fd = fd
        self._room = keep
        self._flood = flood
        self._emit = emit
        self._seen = 0
        self._cut = False
        self._parts: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def flooded(self) -> bool:
        return self._seen > self._flood

    def feed(self, data: bytes) -> None:
        """Add a piece. An incomplete character at its end is held until the rest arrives."""
        self._seen += len(data)
        piece = data[: self._room]
        self._cut = self._cut or len(piece) < len(data)
        self._room -= len(piece)
        self._add(self._decoder.decode(piece))

    def take(self) -> tuple[str, bool]:
        """Return the retained text, and whether anything was cut."""
        if not self._cut:
            self._add(self._decoder.decode(b"", final=True))
        return "".join(self._parts), self._cut

    def _add(self, text: str) -> None:
        if text:
            self._parts.append(text)
            if self._emit is not None:
                self._emit(self._fd, text)


def _take_file(fd: int, keep: int) -> tuple[bytes, int]:
    """Read the beginning of a descriptor's file and truncate the file. Returns nothing if the program closed or
    replaced it."""
    try:
        total = os.fstat(fd).st_size
        if not total:
            return b"", 0
        raw = os.pread(fd, keep, 0)
        os.ftruncate(fd, 0)
    except OSError:
        return b"", 0
    return raw, total


def clip(text: str, keep: int) -> tuple[str, bool]:
    """Return the first `keep` bytes in UTF-8, with lone surrogates replaced, and whether any were cut."""
    raw = text.encode("utf-8", "replace")
    return raw[:keep].decode("utf-8", "ignore"), len(raw) > keep
