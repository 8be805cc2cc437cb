"""Processes as the kernel tells of them: who descends from whom, who is still there, and whom an environment marks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_S = 0.02


@dataclass(frozen=True)
class Process:
    """One process; its start tells it from a later one with the same id."""

    pid: int
    parent: int
    start_ticks: int
    command: str

    @property
    def alive(self) -> bool:
        """Whether it is still there, be it stopped. A zombie has ended."""
        found = _read(self.pid)
        return found is not None and found[0].start_ticks == self.start_ticks and found[1] not in "ZX"

    def __str__(self) -> str:
        return f"{self.pid} ({self.command[-100:]})"


def everybody() -> list[Process]:
    """All processes but zombies."""
    found = [_read(int(path.name)) for path in Path("/proc").glob("[0-9]*")]
    return [one[0] for one in found if one is not None and one[1] not in "ZX"]


def descendants(pid: int) -> list[Process]:
    """Everything that `pid` started, and what that started, parents first."""
    all_of_them = everybody()
    family, members = {pid}, list[Process]()
    while grown := [one for one in all_of_them if one.parent in family and one.pid not in family]:
        family |= {one.pid for one in grown}
        members += grown
    return members


def marked(mark: str) -> list[Process]:
    """Processes whose environment holds `mark`, this one left out."""
    return [one for one in everybody() if one.pid != os.getpid() and mark.encode() in _environment(one.pid)]


async def gone_after(processes: Sequence[Process], limit_s: float) -> tuple[float, list[Process]]:
    """Seconds until all have ended, and who has not within the limit."""
    begin_s = time.monotonic()
    while left := [one for one in processes if one.alive]:
        if time.monotonic() - begin_s > limit_s:
            break
        await asyncio.sleep(_POLL_S)
    return time.monotonic() - begin_s, left


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _read(pid: int) -> tuple[Process, str] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return Process(pid=pid, parent=int(fields[1]), start_ticks=int(fields[19]), command=command), fields[0]
