"""Find processes by a mark in their environment, and wait until processes have exited."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

from ..integration.process_tree import Process, descendants, everybody

__all__ = ["Process", "descendants", "gone_after", "listed", "marked", "same_as"]
_POLL_S = 0.02


def same_as(pid: int) -> Process | None:
    """Return the process with this id now, so that a later process with the same id is not confused with it."""
    return next((one for one in everybody() if one.pid == pid), None)


def marked(mark: str) -> list[Process]:
    """Return the processes whose environment contains `mark`, except this one."""
    found = [one for one in everybody() if mark.encode() in _environment(one.pid)]
    return [one for one in found if one.pid != os.getpid() and one.alive]


async def gone_after(processes: Sequence[Process], limit_s: float) -> tuple[float, list[Process]]:
    """Return the seconds until all have exited, and those that have not within the limit."""
    begin_s = time.monotonic()
    while left := [one for one in processes if one.alive]:
        if time.monotonic() - begin_s > limit_s:
            break
        await asyncio.sleep(_POLL_S)
    return time.monotonic() - begin_s, left


def listed(processes: Sequence[Process]) -> str:
    """Return the processes as text."""
    return ", ".join(f"{one.pid} ({one.command[-100:]})" for one in processes)


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has exited, or is a zombie
        return b""
