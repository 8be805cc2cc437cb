"""Processes as the kernel tells of them, for tests of who ends with whom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """One process; its start distinguishes it from a later one with the same id."""

    pid: int
    parent: int
    start: int
    command: str

    @property
    def alive(self) -> bool:
        """Whether it is still there, be it stopped. A zombie has ended."""
        found = _read(self.pid)
        return found is not None and found[0].start == self.start and found[1] not in "ZX"


def everybody() -> list[Process]:
    """All processes of this host."""
    return [found[0] for path in Path("/proc").glob("[0-9]*") if (found := _read(int(path.name)))]


def descendants(pid: int) -> list[Process]:
    """Everything that `pid` started, and what that started, parents first."""
    known = everybody()
    family = {pid}
    members: list[Process] = []
    while grown := [p for p in known if p.parent in family and p.pid not in family]:
        family |= {process.pid for process in grown}
        members += grown
    return members


def _read(pid: int) -> tuple[Process, str] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return Process(pid=pid, parent=int(fields[1]), start=int(fields[19]), command=command), fields[0]
