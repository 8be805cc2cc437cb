"""Determine the cause of a session's end where the exit status alone is ambiguous.

A session's program is pid 1 of its namespace or a descendant, and the kernel ignores SIGKILL from there. SIGKILL can
therefore come from four sources: the service; the kernel, for the memory of the session's own group; the kernel, for
CPU time, at a limit that the program may have lowered; and another process, such as the host's out-of-memory killer or
an operator. Only the last is an infrastructure failure.

Without a pid namespace a program can kill the first process of its session, so that kill counts as its own. There only
the kill of a reaper certainly comes from outside.
"""

from __future__ import annotations

import signal

from rollmesh.sandbox_runtime.cgroups import Cgroup
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.engines.zygote_process import SessionExit

_CLOCKS_APART = 0.2
"""Relative difference that is possible between the two CPU clocks of the kernel: limits count ticks, reports count
actual run time, which is less on busy cores."""


class MemoryKills:
    """Counts out-of-memory kills in the group of a slot that were caused by the group's own limit. Read at the end of
    each session of the slot, so that the next one starts from there."""

    def __init__(self, group: Cgroup | None) -> None:
        self._group = group
        self._kills = self._hits = 0

    def any_new(self) -> bool:
        """Return whether the kernel has killed in the group since the last call because of the group's own limit."""
        kills, hits = self._kills, self._hits
        self._kills, self._hits = self._read()
        return self._kills > kills and self._hits > hits

    def _read(self) -> tuple[int, int]:
        return (self._group.num_oom_kills(), self._group.num_limit_hits()) if self._group is not None else (0, 0)


def killed_externally(ended: SessionExit, limits: Limits) -> bool:
    """Return whether another process or the kernel of the host killed a session that the service had not asked to end.

    A kill at a CPU limit below the session's own counts as caused by the program, whatever CPU time is reported: only
    the program can have lowered the limit, and a program that runs only around each clock tick is charged many times
    the time that it uses.
    """
    lowered = ended.cpu_limit_s < limits.cpu_total_s
    out_of_cpu = lowered or used_up(ended.cpu_s, ended.cpu_limit_s)
    return ended.status == -signal.SIGKILL and not ended.out_of_memory and not out_of_cpu


def used_up(cpu_s: float, limit_s: float) -> bool:
    """Return whether a process with this reported CPU time may have reached a CPU limit."""
    return cpu_s >= limit_s * (1 - _CLOCKS_APART)
