"""Find what a sandbox service leaves behind, from outside: in /proc, mounts, cgroup trees, locks and directories."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from .process_tree import Process, descendants

_KEPT = ("lock", "snapshots")
"""Files of a state directory between two runs of the service, besides the zygotes' logs."""


class Traces:
    """Resources that one service used in all its runs. Call `note` while it runs and `left` when everything should be
    gone."""

    def __init__(self, state_dir: Path, tmp_dir: Path) -> None:
        self._state_dir = state_dir
        self._tmp_dir = tmp_dir
        self._mounts = _mounts()
        self._groups: set[str] = set()
        self._processes: dict[int, Process] = {}

    def note(self, service_pid: int) -> int:
        """Record the current processes and cgroups. Return the number of processes."""
        self._groups |= {path.name.removeprefix("groups-") for path in self._state_dir.glob("groups-*")}
        found = descendants(service_pid)
        self._processes |= {process.pid: process for process in found}
        return len(found)

    def living(self) -> list[str]:
        """Return processes that should have exited: the recorded ones, those in our cgroups, and those that hold a lock
        of a recorded one."""
        noted = [f"{process.pid} {process.command}" for process in self._processes.values() if process.alive]
        return noted + [f"{pid} in {group}" for pid, group in _members(self._groups)]

    def left(self) -> list[str]:
        """Return all other resources that should be gone."""
        return [
            *(str(path) for name in self._groups for path in _group_dirs(name)),
            *(f"mount {line}" for line in _mounts() - self._mounts),
            *(f"temporary {path}" for path in self._tmp_dir.iterdir()),
            *(f"state {path}" for path in self._state_dir.iterdir() if not _is_kept(path)),
            *(f"snapshot {path}" for path in (self._state_dir / "snapshots").glob("**/*") if path.is_file()),
            *(f"lock {line}" for line in _locks() if int(line.split()[4]) in self._processes),
        ]


def _is_kept(path: Path) -> bool:
    return path.name in _KEPT or (path.name.startswith("zygote-") and path.suffix == ".log")


def _mounts() -> set[str]:
    """Return the mounts of jails in this namespace."""
    return {line for line in Path("/proc/self/mountinfo").read_text().splitlines() if " /session " in line}


def _locks() -> list[str]:
    """Lines of held locks. A line with `->` is a process that waits for one, and has its fields shifted."""
    return [line for line in Path("/proc/locks").read_text().splitlines() if " -> " not in line]


def _members(groups: set[str]) -> Iterator[tuple[int, str]]:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            text = (path / "cgroup").read_text()
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            yield from ((int(path.name), name) for name in groups if f"rollmesh-sandbox-{name}-" in text)


def _group_dirs(name: str) -> Iterator[Path]:
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        yield from (Path(folder) / found for found in names if found.startswith(f"rollmesh-sandbox-{name}-"))
