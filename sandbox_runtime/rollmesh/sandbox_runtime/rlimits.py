"""Resource limits of every process in a session, hard and soft alike: what the jailed process can't raise again. Only a profile
that asks for more address space than memory has room between the two.

RLIMIT_NPROC counts per uid and user namespace, so it bounds a session only because each has a uid or a user namespace of
its own. RLIMIT_AS is per process: the whole session's memory is bounded by a cgroup where one is writable.
"""

from __future__ import annotations

import resource

from rollmesh.sandbox_runtime.limits import Limits

_CORE_BYTES = 1
"""Too few for any core file, and the one value for which the kernel starts no program of `core_pattern` either: with 0 it would pipe
each crash to the host's. A program can lower it to 0, and then crashes as if there were no limit here."""
_SIGPENDING_MAX = 256
"""Queued signals and timers: kernel memory that no other limit counts where no memory cgroup is writable."""


def apply(limits: Limits, *, processes: bool = True) -> None:
    """Set them all; raises OSError or ValueError if one is refused. `processes`: whether the session has a count of its own."""
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.address_space_bytes or limits.memory_bytes))
    for kind, value in (
        (resource.RLIMIT_CPU, limits.cpu_total_s),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files_max),
        (resource.RLIMIT_CORE, _CORE_BYTES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, _SIGPENDING_MAX),
        (resource.RLIMIT_NICE, 0),
        (resource.RLIMIT_RTPRIO, 0),
    ):
        resource.setrlimit(kind, (value, value))
    if processes:
        resource.setrlimit(resource.RLIMIT_NPROC, (limits.processes_max, limits.processes_max))
