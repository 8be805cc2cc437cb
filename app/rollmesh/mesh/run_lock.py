"""One owner of a run folder at a time, because two meshes over one folder would compete for its addresses and its
ledger.

The kernel holds the lock, so it is released when its owner exits.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollmesh.shared.errors import FailedPrecondition, NotReady

FILE = "owner.lock"


class RunFolderBusy(FailedPrecondition):
    """Another process runs the run in this folder. The message names the process."""

    reason = "RUN_FOLDER_BUSY"


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """Own the folder until the context is left. Raises RunFolderBusy."""
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run_dir / FILE, os.O_RDWR | os.O_CREAT, 0o600)  # not inherited by children
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise RunFolderBusy(
                f"{run_dir}: process {owner} executes this run; stop it first (Ctrl-C there, or `kill {owner}`)",
                pid=owner,
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def owner_of(run_dir: Path) -> str:
    """Return the id of the process that executes the run in the folder now; empty if there is none."""
    try:
        with owned(run_dir):
            return ""
    except RunFolderBusy as err:
        return err.metadata["pid"]


def still_starting(run_dir: Path) -> NotReady | None:
    """Return the error for a run whose services do not respond although a process executes it; None if no process
    does."""
    owner = owner_of(run_dir)
    if not owner:
        return None
    return NotReady(
        f"{run_dir}: the run is starting or stopping (process {owner}); try again in some seconds", pid=owner
    )
