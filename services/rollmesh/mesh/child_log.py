"""The log file of a process: appended to by the process itself, bounded from outside.

The process writes straight into the file, so nothing it says is lost with its supervisor, and no full pipe can hold it up. The file is
opened for appending: after it is cut, the process goes on at its new end. A line written while it is being cut may be lost.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

_TAIL_BYTES = 4000
_COPY_BYTES = 1 << 20


class ChildLog:
    """One file over all lives of a process."""

    def __init__(self, path: Path, *, bytes_max: int) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._begin = 0
        path.parent.mkdir(parents=True, exist_ok=True)

    def open(self) -> BinaryIO:
        """For the next life of the process."""
        self.trim()
        file = self.path.open("ab")
        self._begin = file.tell()
        return file

    def trim(self) -> None:
        """Cuts a file that is too large to its newest part."""
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            return
        if size <= self._bytes_max:
            return
        kept = min(_COPY_BYTES, self._bytes_max // 2)
        with self.path.open("r+b") as file:
            file.seek(size - kept)
            tail = file.read(kept).partition(b"\n")[2]
            os.ftruncate(file.fileno(), 0)
        with self.path.open("ab") as file:
            file.write(tail)
        self._begin = 0

    def tail(self) -> str:
        """The last lines of the present or last life."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._begin, size - _TAIL_BYTES))
                return file.read(_TAIL_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def last_error(self) -> str:
        """What the process itself gave as the reason of its end; empty if it gave none."""
        _, found, told = ("\n" + self.tail()).rpartition("\nerror: ")
        return told if found else ""
