"""Control groups, version 1 or 2 as detected: they bound memory, swap, process count and cores of a whole session,
where they are writable.

Runs in the service. There is one group per slot, created once and reused by one session after another, so that a
session costs one write per controller: the service passes open files of the groups, and the session's pid 1 adds
itself. A missing controller is not an error; `mechanisms` describes the consequence.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollmesh.sandbox_runtime import mechanisms
from rollmesh.sandbox_runtime.limits import Limits

PREFIX = "rollmesh-sandbox-"
"""Prefix of our groups' names, by which a later start finds remaining ones."""

_EVENTS_BYTES = 4096
_PEAK_SLACK_BYTES = 1 << 20
"""Bytes that the kernel charges ahead in batches, so that a peak can be below the limit by this amount."""
_MEMORY, _PIDS, _CPU = "memory", "pids", "cpu"
_CONTROLLERS = (_MEMORY, _PIDS, _CPU)
_PERIOD_US = 100_000
_MEMORY_AND_SWAP = "memory.memsw.limit_in_bytes"
_KILL_S = 5.0


@dataclass(slots=True)
class Cgroup:
    """The groups of one slot: a directory per controller, and the events file that counts out-of-memory kills."""

    directories: Mapping[str, Path]
    version: int
    _limits: Limits | None = field(default=None, init=False)
    _num_peaks: int = field(default=0, init=False)

    def enter(self, limits: Limits) -> list[int]:
        """Write the limits unless they are set already, and open the files through which a single-threaded process
        enters by writing 0. The caller closes them. In version 2 all controllers share one. Raises OSError.

        A manager of the host may delete a group while it is empty; such a group is created again.
        """
        try:
            return self._enter(limits)
        except FileNotFoundError:
            self._limits = None
            for path in dict.fromkeys(self.directories.values()):
                path.mkdir(exist_ok=True)
            return self._enter(limits)

    def _enter(self, limits: Limits) -> list[int]:
        if limits != self._limits:
            self._write(limits)
        # Version 1's `tasks` moves only the writing thread; `cgroup.procs` would block every fork and exit on the
        # host meanwhile.
        name = "tasks" if self.version == 1 else "cgroup.procs"
        fds: list[int] = []
        try:
            for path in dict.fromkeys(self.directories.values()):
                fds.append(os.open(f"{path}/{name}", os.O_WRONLY | os.O_CLOEXEC))
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        return fds

    def _write(self, limits: Limits) -> None:
        memory = self.directories.get(_MEMORY)
        # Version 1 bounds memory and swap together, and rejects a memory limit above that bound.
        if self.version == 1 and memory is not None and (memory / _MEMORY_AND_SWAP).exists():
            (memory / _MEMORY_AND_SWAP).write_text("-1")
        for controller, path in self.directories.items():
            for name, value in _settings(self.version, controller, limits):
                (path / name).write_text(value)
        if memory is not None:
            _bound_swap(self.version, memory, limits)
        self._limits = limits

    def num_oom_kills(self) -> int:
        """Return the number of processes killed for memory in this group so far."""
        text = self._read_memory("memory.oom_control" if self.version == 1 else "memory.events")
        return int(text.partition(b"oom_kill ")[2].partition(b"\n")[0] or 0)

    def num_limit_hits(self) -> int:
        """Return how often this group's own memory limit was reached. A kill without such a hit was caused by memory
        pressure elsewhere on the host."""
        if self.version == 1:
            return self._num_peaks_at_limit()
        return int(self._read_memory("memory.events").partition(b"\noom ")[2].partition(b"\n")[0] or 0)

    def _num_peaks_at_limit(self) -> int:
        """Count peaks at the limit and reset the peak, because version 1 does not count failures of memory and swap
        together."""
        name = "memory.memsw.max_usage_in_bytes"
        peak = self._read_memory(name)
        if not peak:
            name = "memory.max_usage_in_bytes"
            peak = self._read_memory(name)
        limits = self._limits
        if peak and limits is not None and int(peak) >= limits.memory_bytes + limits.disk_bytes - _PEAK_SLACK_BYTES:
            self._num_peaks += 1
            (self.directories[_MEMORY] / name).write_text("0")
        return self._num_peaks

    def _read_memory(self, name: str) -> bytes:
        path = self.directories.get(_MEMORY)
        if path is None:
            return b""
        try:
            fd = os.open(f"{path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # swap is not accounted
            return b""
        try:
            return os.read(fd, _EVENTS_BYTES)
        finally:
            os.close(fd)

    def kill(self) -> None:
        """Kill all processes in the groups. Returns when they are empty; raises OSError after a timeout."""
        for path in dict.fromkeys(self.directories.values()):
            kill_all(path)

    def remove(self) -> None:
        """Delete the directories. A group that still holds processes remains, and the next start cleans it up."""
        for path in dict.fromkeys(self.directories.values()):
            _remove(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """Where groups can be created: a writable directory per controller."""

    version: int
    parents: Mapping[str, Path]

    def provided(self) -> frozenset[str]:
        """Return the isolation mechanisms that these groups provide."""
        names = {_MEMORY: mechanisms.MEMORY_CGROUP, _PIDS: mechanisms.PIDS_CGROUP, _CPU: mechanisms.CPU_CGROUP}
        found = {names[controller] for controller in self.parents}
        counted = self.version == 2 or (self.parents.get(_MEMORY, Path()) / _MEMORY_AND_SWAP).exists()
        if _MEMORY in self.parents and counted and Path("/proc/swaps").exists():
            found.add(mechanisms.SWAP)
        return frozenset(found)

    def make(self, name: str) -> Cgroup:
        """Create a group `PREFIX + name`. Raises OSError."""
        paths = {controller: parent / (PREFIX + name) for controller, parent in self.parents.items()}
        for path in dict.fromkeys(paths.values()):
            path.mkdir(exist_ok=True)
        return Cgroup(directories=paths, version=self.version)

    def find(self, name_prefix: str) -> Iterator[Path]:
        """Find the groups whose names begin with `PREFIX + name_prefix`."""
        for parent in dict.fromkeys(self.parents.values()):
            yield from parent.glob(f"{PREFIX}{name_prefix}*")


def _settings(version: int, controller: str, limits: Limits) -> list[tuple[str, str]]:
    """Return the files and the values to write, in order."""
    memory_bytes = str(limits.memory_bytes + limits.disk_bytes)
    quota_us = round(limits.cpus * _PERIOD_US)
    if controller == _PIDS:
        return [("pids.max", str(limits.processes_max))]
    if version == 2:
        return [("cpu.max", f"{quota_us} {_PERIOD_US}")] if controller == _CPU else [("memory.max", memory_bytes)]
    if controller == _CPU:
        return [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", str(quota_us))]
    return [("memory.limit_in_bytes", memory_bytes)]


def _bound_swap(version: int, path: Path, limits: Limits) -> None:
    """Forbid swap."""
    if version == 2:
        if (path / "memory.swap.max").exists():
            (path / "memory.swap.max").write_text("0")
    elif (path / _MEMORY_AND_SWAP).exists():
        (path / _MEMORY_AND_SWAP).write_text(str(limits.memory_bytes + limits.disk_bytes))


def detect_here() -> Hierarchy | None:
    """Detect the groups of this process."""
    return detect(Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text())


def detect(mounts: str, memberships: str) -> Hierarchy | None:
    """Return the usable groups from the texts of /proc/self/mounts and /proc/self/cgroup; None if nothing is writable.

    Version 2 is used only if its controllers are delegated to children of the current group.
    """
    own = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            own[controller] = path
    return _detect_v2(mounts, own.get("")) or _detect_v1(mounts, own)


def _detect_v2(mounts: str, path: str | None) -> Hierarchy | None:
    for mount in _mounted(mounts, "cgroup2", None):
        group = _below(mount, path)
        enabled = _read(group / "cgroup.subtree_control").split()
        usable = {name: group for name in _CONTROLLERS if name in enabled}
        if usable and os.access(group, os.W_OK):
            return Hierarchy(version=2, parents=usable)
    return None


def _detect_v1(mounts: str, own: Mapping[str, str]) -> Hierarchy | None:
    parents = {}
    for controller in _CONTROLLERS:
        for mount in _mounted(mounts, "cgroup", controller):
            group = _below(mount, own.get(controller))
            if os.access(group, os.W_OK):
                parents[controller] = group
    return Hierarchy(version=1, parents=parents) if parents else None


def _mounted(mounts: str, kind: str, option: str | None) -> Iterator[Path]:
    for line in mounts.splitlines():
        _, mount, found, options, *_ = line.split(" ")
        if found == kind and (option is None or option in options.split(",")):
            yield Path(mount)


def _below(mount: Path, path: str | None) -> Path:
    """Return our own group, or the mount itself if a container hides the rest of the tree."""
    group = mount / (path or "/").lstrip("/")
    return group if group.is_dir() else mount


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def kill_all(path: Path) -> None:
    """Kill all processes in a group. Returns when it is empty; raises OSError if it does not become empty."""
    until = time.monotonic() + _KILL_S
    while members := (path / "cgroup.procs").read_text().split():
        if (path / "cgroup.kill").exists():
            (path / "cgroup.kill").write_text("1")
        else:
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > until:
            raise OSError(f"{path} still holds processes {' '.join(members)}")
        time.sleep(0.002)  # the kernel empties a killed group within milliseconds; version 1 has no event to wait for


def remove_all(paths: Iterable[Path]) -> int:
    """Delete groups. Return the number of deleted groups."""
    return sum(_remove(path) for path in paths)


def _remove(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError:
        return False
    return True
