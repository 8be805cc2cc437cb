"""A full disk as a typed error. Python, safetensors and torch report it in different ways."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmesh.shared.errors import DiskFull

_FULL = (errno.ENOSPC, errno.EDQUOT)
_WORDS = ("No space left on device", "os error 28", "file write failed")


@contextmanager
def disk_full_errors(place: Path) -> Iterator[None]:
    """Convert an error that a full disk at `place` caused into `DiskFull`. Other errors pass unchanged."""
    try:
        yield
    except Exception as err:
        if not is_disk_full(err):
            raise
        raise DiskFull(
            f"{place}: no space left on the device ({free_bytes(place) >> 20} MiB free); free some, e.g. by `rollmesh "
            "clean`, then resume the run",
            path=place,
        ) from err


def is_disk_full(err: BaseException) -> bool:
    """Return whether a full disk or quota caused `err`."""
    if isinstance(err, OSError) and err.errno is not None:
        return err.errno in _FULL
    return any(word in str(err) for word in _WORDS)


def free_bytes(place: Path) -> int:
    """Return the free bytes on the disk of `place`, which need not exist yet."""
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free
