"""Snapshots of the data service on disk: they bound its recovery and are never needed for it.

The state is a snapshot plus the fold of the ledger after it; without one, the fold of the whole ledger gives the same. A file appears under
its name only when it is complete, and holds a digest of itself. Others may hold states as well (a trainer's checkpoints do); they are
offered in the order of age. Whoever restores one checks that it is of this ledger.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

KEPT = 2
"""Files kept per run: the newest, and one to fall back to."""
_SUFFIX = ".snapshot"
_DIGEST_BYTES = 32
_log = logging.getLogger(__name__)


class SnapshotFolder:
    """The snapshots of all runs in one folder, a folder for each."""

    def __init__(self, folder: Path, *, more: Callable[[], Iterable[Path]] = tuple) -> None:
        """`more` lists files of others that hold bare states, newest first."""
        self._folder = folder
        self._more = more

    def save(self, run: str, position: int, state: bytes) -> None:
        """Store a state durably, and drop all but the newest `KEPT`. Raises OSError."""
        folder = self._folder / run
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{position:020d}{_SUFFIX}"
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(hashlib.sha256(state).digest() + state)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        for old in self._files(run)[KEPT:]:
            old.unlink(missing_ok=True)

    def load(self, run: str) -> Iterator[tuple[Path, bytes]]:
        """Readable states with their files, newest first, those of others last."""
        for path in self._files(run):
            content = _read(path)
            if hashlib.sha256(content[_DIGEST_BYTES:]).digest() == content[:_DIGEST_BYTES]:
                yield path, content[_DIGEST_BYTES:]
            else:
                _log.warning("snapshot %s is passed by: its digest does not match", path)
        for path in self._more():
            if state := _read(path):
                yield path, state

    def delete(self, run: str) -> None:
        """Delete the snapshots of a run, without those of others."""
        shutil.rmtree(self._folder / run, ignore_errors=True)

    def _files(self, run: str) -> list[Path]:
        return sorted((self._folder / run).glob(f"*{_SUFFIX}"), reverse=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        _log.warning("snapshot %s is passed by: %s", path, error)
        return b""
