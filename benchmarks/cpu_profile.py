"""Attribute the CPU seconds of a process tree: by Python owner in the main thread, by native thread, by child process.

The profiling timer of the kernel interrupts the main thread each time the process has used a few milliseconds of CPU.
The handler walks the frames and assigns the sample to the nearest one with an owner. Samples are only shares: they are
scaled to the CPU clock of the main thread. All other values are read from /proc, where a tick is 10 ms, so measure for
seconds. Linux only.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

SAMPLE_S = 0.002
WAITING = "waiting"
"""Owner of code that waits. A sample that hits it first belongs to the CPU of another thread and is not counted."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Owner = Callable[[str], str]
"""Returns the owner of a source file, or an empty string."""


@dataclass(slots=True)
class Profile:
    """CPU seconds between entry and exit of `CpuProfile`."""

    wall_s: float = 0.0
    owners: dict[str, float] = field(default_factory=dict)
    """CPU seconds of the main thread, by owner."""
    functions: dict[tuple[str, str], float] = field(default_factory=dict)
    """CPU seconds of the main thread, by owner and its innermost function."""
    threads: dict[str, float] = field(default_factory=dict)
    """CPU seconds of the other threads of this process, by name."""
    children: dict[str, float] = field(default_factory=dict)
    """CPU seconds of descendant processes, by command, including children that they waited for."""

    @property
    def total_s(self) -> float:
        return sum(self.owners.values()) + sum(self.threads.values()) + sum(self.children.values())


class CpuProfile:
    """`with CpuProfile(owner) as profile: ...`, in the main thread; `profile` is filled on exit."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._known: dict[str, str] = {}
        self._samples: Counter[tuple[str, str]] = Counter()
        self.profile = Profile()

    def __enter__(self) -> Profile:
        self._before = (time.perf_counter(), _threads(), _descendants())
        self._handler = signal.signal(signal.SIGPROF, self._on_sample)
        signal.setitimer(signal.ITIMER_PROF, SAMPLE_S, SAMPLE_S)
        return self.profile

    def __exit__(self, *exc: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, self._handler)
        wall_s, threads, children = self._before
        profile = self.profile
        profile.wall_s = time.perf_counter() - wall_s
        spent = _by_name(_threads(), threads)
        main_s = spent.pop("main", 0.0)
        profile.threads = spent
        profile.children = _by_name(_descendants(), children)
        num = max(1, self._samples.total())
        for (owner, function), count in self._samples.items():
            profile.functions[owner, function] = main_s * count / num
            profile.owners[owner] = profile.owners.get(owner, 0.0) + main_s * count / num

    def _on_sample(self, number: int, frame: FrameType | None) -> None:
        leaf = frame
        while frame is not None:
            if owner := self._owner_of(frame.f_code.co_filename):
                if owner != WAITING:
                    self._samples[owner, frame.f_code.co_qualname] += 1
                return
            frame = frame.f_back
        self._samples["elsewhere", leaf.f_code.co_qualname if leaf else ""] += 1

    def _owner_of(self, filename: str) -> str:
        if filename not in self._known:
            self._known[filename] = self._owner(filename)
        return self._known[filename]


def by_source(*owners: tuple[str, str]) -> Callable[[str], str]:
    """Return a function from source file to owner. `owners` are regular expressions with the names for the first that
    matches; files of this project begin with `rollmesh/` there, wherever they are stored."""
    patterns = [(re.compile(pattern), name) for pattern, name in owners]

    def owner_of(filename: str) -> str:
        _, package, module = filename.rpartition("/rollmesh/")
        if package and "/site-packages/" not in module:  # a checkout named rollmesh can hold the environment, too
            filename = f"rollmesh/{module}"
        matches = ((pattern.search(filename), name) for pattern, name in patterns)
        return next((match.expand(name) for match, name in matches if match is not None), "")

    return owner_of


Spent = dict[str, tuple[str, float]]
"""Name and CPU seconds by id of a thread or process."""


def _by_name(after: Spent, before: Spent) -> dict[str, float]:
    spent: dict[str, float] = {}
    for key, (name, seconds) in after.items():
        used_s = seconds - before.get(key, ("", 0.0))[1]
        if used_s > 0:
            spent[name] = spent.get(name, 0.0) + used_s
    return spent


def _threads() -> Spent:
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    found: Spent = {}
    for path in Path("/proc/self/task").iterdir():
        if (stat := _stat(path)) is not None:
            comm, fields = stat
            name = "main" if path.name == str(os.getpid()) else names.get(path.name, f"native {comm}")
            found[path.name] = (name, (int(fields[11]) + int(fields[12])) / _TICKS_PER_S)
    return found


def _descendants() -> Spent:
    """Return the running descendants, each with the children that it waited for, and the seconds that this process
    waited for."""
    parents, spent = _processes()
    me = str(os.getpid())
    below = {pid: spent[pid] for pid in parents if _is_below(pid, me, parents)}
    reaped = os.times()
    return below | {"reaped": ("ended children", reaped.children_user + reaped.children_system)}


def _processes() -> tuple[dict[str, str], Spent]:
    """Return the parents of all processes by id, and the CPU of each, with the children that it waited for."""
    parents: dict[str, str] = {}
    spent: Spent = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and (stat := _stat(path)) is not None:
            comm, fields = stat
            parents[path.name] = fields[1]
            spent[path.name] = (comm, sum(int(field) for field in fields[11:15]) / _TICKS_PER_S)
    return parents, spent


def cpu_s_of(pids: Mapping[str, int]) -> dict[str, float]:
    """Return the CPU seconds of processes by name, each with its descendants and the children that it waited for."""
    parents, spent = _processes()
    return {
        name: sum(
            seconds for key, (_, seconds) in spent.items() if key == str(pid) or _is_below(key, str(pid), parents)
        )
        for name, pid in pids.items()
    }


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process and its descendants, including exited ones."""
    own = os.times()
    return own.user + own.system + sum(seconds for _, seconds in _descendants().values())


def _is_below(pid: str, ancestor: str, parents: dict[str, str]) -> bool:
    while (pid := parents.get(pid, "0")) not in ("0", "1"):
        if pid == ancestor:
            return True
    return False


def _stat(path: Path) -> tuple[str, list[str]] | None:
    """Return the command and the fields of stat in proc(5) from the third on; None if the process has exited."""
    try:
        text = (path / "stat").read_text()
    except OSError:
        return None
    command, _, rest = text.partition("(")[2].rpartition(")")
    return command, rest.split()
