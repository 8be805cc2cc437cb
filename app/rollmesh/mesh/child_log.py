"""The log file of a process: appended to by the process itself, bounded from outside.

The process writes into the file itself, so its output survives a crash of the supervisor, and no full pipe can block
it. The file is opened for appending, so the process continues at the new end after a cut. A line that is written during
the cut may be lost.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from rollmesh.shared.store.private_files import private_folder, private_opener

_TAIL_BYTES = 4000
_COPY_BYTES = 1 << 20


class ChildLog:
    """One file for all starts of a process."""

    def __init__(self, path: Path, *, bytes_max: int) -> None:
        self.path = path
        self._bytes_max = bytes_max
        self._begin = 0
        private_folder(path.parent)

    def open(self) -> BinaryIO:
        """Prepare the file for the next start of the process."""
        self.trim()
        file = open(self.path, "ab", opener=private_opener)  # noqa: SIM115 (the child inherits it)
        self._begin = file.tell()
        return file

    def trim(self) -> None:
        """Cut a file that is too large to its newest part."""
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
        with open(self.path, "ab", opener=private_opener) as file:
            file.write(tail)
        self._begin = 0

    def tail(self) -> str:
        """Return the last lines of the current or latest start."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._begin, size - _TAIL_BYTES))
                return file.read(_TAIL_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def last_error(self) -> str:
        """Return the reason that the process logged for its exit; empty if it logged none."""
        _, found, error = ("\n" + self.tail()).rpartition("\nerror: ")
        return error if found else ""
