"""Resource limits of every process in a session. Hard and soft limits are equal, so that the process cannot raise them,
except for a profile with more address space than memory.

RLIMIT_NPROC counts per uid and user namespace, so it bounds a session only because each has a separate uid or user
namespace. RLIMIT_AS is per process; a cgroup, if one is writable, bounds the memory of the whole session.
"""

from __future__ import annotations

import resource

from rollmesh.sandbox_runtime.limits import Limits

_CORE_BYTES = 1
"""Too few bytes for any core file, and the one value with which the kernel does not start a program of `core_pattern`
either; with 0 it would pipe each crash to the host's program. A program can lower it to 0, and then crashes as if this
limit did not exist."""
_SIGPENDING_MAX = 256
"""Maximum number of queued signals and timers, which use kernel memory that no other limit counts without a memory
cgroup."""


def apply(limits: Limits, *, processes: bool = True) -> None:
    """Set all limits. Raises OSError or ValueError if one is rejected. `processes`: whether the session has a separate
    count of processes."""
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
