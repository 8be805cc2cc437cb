"""Uids of a sandbox node's sessions, separate from those of every other node on this host.

A range is claimed block by block with file locks, which the kernel releases when the process exits. The blocks are in
ranges that systemd does not allocate: 60578-61183 first, then 65536-524287.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rollmesh.shared.errors import ConfigError

BLOCK = 64
ROOM = (range(60578, 61184), range(65536, 524288))
_LOCKS = Path("/run/lock")


class UidRange:
    """At least `num` uids from `base`, claimed until `release`."""

    def __init__(self, base: int, locks: list[int]) -> None:
        self.base = base
        self._locks = locks

    def release(self) -> None:
        """Release the range. Idempotent."""
        while self._locks:
            os.close(self._locks.pop())


def claim_uids(num: int, folder: Path | None = None) -> UidRange:
    """Claim the first range of `num` uids that no process on this host holds. Raises ConfigError if there is none.
    `folder` holds the locks."""
    where = folder or (_LOCKS if os.access(_LOCKS, os.W_OK) else Path(tempfile.gettempdir()))
    num_blocks = -(-num // BLOCK)
    for room in ROOM:
        for base in range(room.start, room.stop - num_blocks * BLOCK + 1, BLOCK):
            locks = _lock_all(where, range(base, base + num_blocks * BLOCK, BLOCK))
            if locks:
                return UidRange(base, locks)
    raise ConfigError(
        f"no range of {num} uids is free for sandbox sessions on this host; set sandbox.uid_base to another range"
    )


def _lock_all(folder: Path, starts: Iterable[int]) -> list[int]:
    """Lock all blocks or none."""
    locks: list[int] = []
    for start in starts:
        lock = os.open(folder / f"rollmesh-uids-{start}", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        locks.append(lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            UidRange(start, locks).release()
            return []
    return locks
