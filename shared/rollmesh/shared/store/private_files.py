"""Folders and files that only their owner can read, whatever the umask: they hold samples, decisions or logs of a
run."""

from __future__ import annotations

import os
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Create the folder if it does not exist, and let only its owner enter it. Return it."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077 and path.stat().st_uid == os.geteuid():
        path.chmod(0o700)  # of an earlier release
    return path


def private_opener(path: str, flags: int) -> int:
    """Open a file; one that is created has mode 0600. For `open(..., opener=private_opener)`."""
    return os.open(path, flags, 0o600)
