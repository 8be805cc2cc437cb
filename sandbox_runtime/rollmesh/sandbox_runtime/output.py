"""What a call prints: a bounded text stream for Python's own writes, and bounded files for writes to descriptors 1 and 2."""

from __future__ import annotations

import io
import os


class OutputLimitError(BaseException):
    """The call printed more than the flood limit. A BaseException, so that `except Exception` in a print loop won't eat it."""


class BoundedText(io.TextIOBase):
    """Keeps the first `keep` characters, drops the rest, raises past `flood` of them. `fileno` is the descriptor it stands for."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, fd: int, *, keep: int, flood: int) -> None:
        self._fd = fd
        self._keep = keep
        self._flood = flood
        self._parts: list[str] = []
        self._kept = 0
        self._seen = 0

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._seen += len(text)
        room = self._keep - self._kept
        if room > 0:
            piece = text[:room]
            self._parts.append(piece)
            self._kept += len(piece)
        if self._seen > self._flood:
            raise OutputLimitError(f"more than {self._flood} characters printed")
        return len(text)

    def take(self) -> tuple[str, bool]:
        """What was kept since the last take, with what child processes wrote to the descriptor, and whether any was cut."""
        text, seen = "".join(self._parts), self._seen
        self._parts, self._kept, self._seen = [], 0, 0
        raw, total = _take_file(self._fd, self._keep)
        text, cut = clip(text + raw.decode("utf-8", "replace"), self._keep)
        return text, cut or seen > self._keep or total > len(raw)


def _take_file(fd: int, keep: int) -> tuple[bytes, int]:
    """Read the beginning of a descriptor's file and empty it; nothing if the program closed or replaced it."""
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
    """The first `keep` bytes in UTF-8, lone surrogates replaced, and whether any were cut."""
    raw = text.encode("utf-8", "replace")
    return raw[:keep].decode("utf-8", "ignore"), len(raw) > keep
