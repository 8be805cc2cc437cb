"""Attribute CPU to services of the mesh: by source file and thread in one process, by process if each service has its
own.

Services have the same names in both cases, so that one table shows both. In one process, the time of gRPC and asyncio
between handlers, and of the codecs and clients in `shared`, cannot be assigned to a service and has its own rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.cpu_profile import WAITING, CpuProfile, Profile, by_source, cpu_s_of
from rollmesh.mesh.supervisor import Supervisor

MODEL = "model"
"""Key of the seconds of generation and training, which are also part of the seconds of their services."""
LIBRARIES = "grpc, asyncio"
_TRAINER = "trainer"
owner_of = by_source(
    (r"rollmesh/services/learner/engines/|rollmesh/trainer/", _TRAINER),
    (r"benchmarks/", "bench (loop, stand-ins)"),
    (r"rollmesh/services/weights/", "depot"),
    (r"rollmesh/services/(\w+)/", r"\1"),
    (r"rollmesh/sandbox_runtime/", "sandbox"),
    (r"rollmesh/shared/", "shared"),
    (r"/selectors\.py", WAITING),
    (r"/(?:grpc|asyncio)/", LIBRARIES),
    (r"/nats/", "shared"),
    (r"/tokenizers/", "rollout"),
)
_THREADS = (("engine", "inference"), ("learner-compute", "learner"))
"""Services by prefix of the thread name; other threads belong to libraries."""


@contextmanager
def profiled_here() -> Iterator[dict[str, float]]:
    """CPU seconds by service inside the block, and `MODEL`, filled on exit. Use it in the main thread."""
    spent: dict[str, float] = {}
    with CpuProfile(owner_of) as profile:
        yield spent
    spent |= by_part(profile)


def by_part(profile: Profile) -> dict[str, float]:
    """Return the seconds of the profile by service, and `MODEL`."""
    parts = dict(profile.owners)
    trainer_s = parts.pop(_TRAINER, 0.0)
    computing = {"learner": trainer_s}
    for name, seconds in profile.threads.items():
        part = next((part for begin, part in _THREADS if name.startswith(begin)), "")
        into, key = (computing, part) if part else (parts, LIBRARIES)
        into[key] = into.get(key, 0.0) + seconds
    for part, seconds in computing.items():
        parts[part] = parts.get(part, 0.0) + seconds
    for command, seconds in profile.children.items():
        part = "nats" if command.startswith("nats") else "sandbox"
        parts[part] = parts.get(part, 0.0) + seconds
    return parts | {MODEL: sum(computing.values())}


@contextmanager
def profiled_by_process(supervisor: Supervisor) -> Iterator[dict[str, float]]:
    """Return the seconds of processes by service, without `MODEL`, because processes are not profiled."""
    spent: dict[str, float] = {}
    before, own_s = cpu_s_of(supervisor.pids), time.process_time()
    yield spent
    after = cpu_s_of(supervisor.pids)
    spent["supervisor"] = time.process_time() - own_s
    for name, seconds in after.items():
        part = name.partition("-")[0]
        spent[part] = spent.get(part, 0.0) + seconds - before.get(name, 0.0)
