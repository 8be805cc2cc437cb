"""Snapshots of the data service on disk. They shorten its recovery, which does not depend on them.

The state is a snapshot plus the fold of the later ledger records. Without a snapshot, the fold of the whole ledger
gives the same state. A file gets its name only when it is complete, and it contains a digest of itself. Other files,
such as checkpoints of a trainer, may contain states as well. They are offered by age. The caller that restores a state
checks that it is of this ledger.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rollmesh.shared.store.private_files import private_folder
from rollmesh.shared.store.whole_files import write_whole

KEPT = 2
"""Number of files kept per run: the newest and a fallback."""
_SUFFIX = ".snapshot"
_DIGEST_BYTES = 32
_log = logging.getLogger(__name__)


class SnapshotFolder:
    """The snapshots of all runs, in one folder per run."""

    def __init__(self, folder: Path, *, more: Callable[[], Iterable[Path]] = tuple) -> None:
        """`more` lists other files that contain bare states, newest first."""
        self._folder = folder
        self._more = more

    def save(self, run: str, position: int, state: bytes) -> None:
        """Store a state durably, and delete all but the newest `KEPT`. Raise OSError."""
        folder = private_folder(self._folder / run)
        path = folder / f"{position:020d}{_SUFFIX}"
        write_whole(path, hashlib.sha256(state).digest() + state)
        for old in self._files(run)[KEPT:]:
            old.unlink(missing_ok=True)

    def load(self, run: str) -> Iterator[tuple[Path, bytes]]:
        """Yield readable states with their files, newest first and those of `more` last."""
        for path in self._files(run):
            content = _read(path)
            if hashlib.sha256(content[_DIGEST_BYTES:]).digest() == content[:_DIGEST_BYTES]:
                yield path, content[_DIGEST_BYTES:]
            else:
                _log.warning("snapshot skipped: %s: its digest does not match", path)
        for path in self._more():
            if state := _read(path):
                yield path, state

    def delete(self, run: str) -> None:
        """Delete the snapshots of a run. Files of `more` remain."""
        shutil.rmtree(self._folder / run, ignore_errors=True)

    def _files(self, run: str) -> list[Path]:
        return sorted((self._folder / run).glob(f"*{_SUFFIX}"), reverse=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        _log.warning("snapshot skipped: %s: %s", path, error)
        return b""
