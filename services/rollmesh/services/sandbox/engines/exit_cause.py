"""Whose doing the end of a session was, where the kernel's word alone does not say.

A session's program is pid 1 of its namespace or below it, and the kernel ignores SIGKILL from there. So SIGKILL has four senders: us; the
kernel for memory of the session's own group; the kernel for CPU time, at a limit which the program may have lowered; and somebody outside,
as the host's out-of-memory killer or an operator. Only the last is an infra failure.

Without a pid namespace a program can kill its session's first process itself, so that is its own doing, whoever it was; there only the kill
of a warden comes from outside for sure.
"""

from __future__ import annotations

import signal

from rollmesh.sandbox_runtime.cgroups import Cgroup
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.engines.zygote_process import SessionExit

_CLOCKS_APART = 0.2
"""Share by which the kernel's two clocks of a process may differ: limits count ticks, reports what really ran, less on busy cores."""


class MemoryKills:
    """Kills for memory in the group of a place, and whether its own limit was the reason. Asked at the end of each of its sessions, so that the
    next begins where that ended."""

    def __init__(self, group: Cgroup | None) -> None:
        self._group = group
        self._kills = self._hits = 0

    def any_new(self) -> bool:
        """Whether the kernel has killed in it since this was asked last, because of its own limit."""
        kills, hits = self._kills, self._hits
        self._kills, self._hits = self._read()
        return self._kills > kills and self._hits > hits

    def _read(self) -> tuple[int, int]:
        return (self._group.num_oom_kills(), self._group.num_limit_hits()) if self._group is not None else (0, 0)


def killed_externally(ended: SessionExit, limits: Limits) -> bool:
    """Return whether a session that ended before we asked for it was killed by another process on the host or by its kernel.

    A kill at a CPU limit below the session's own counts as the program's doing, whatever CPU time is reported: only the program can
    have lowered the limit, and one that runs just around each clock tick is charged many times the time that it uses.
    """
    lowered = ended.cpu_limit_s < limits.cpu_total_s
    out_of_cpu = lowered or used_up(ended.cpu_s, ended.cpu_limit_s)
    return ended.status == -signal.SIGKILL and not ended.out_of_memory and not out_of_cpu


def used_up(cpu_s: float, limit_s: float) -> bool:
    """Whether a process that is reported to have run for `cpu_s` may have met a limit of CPU time."""
    return cpu_s >= limit_s * (1 - _CLOCKS_APART)
