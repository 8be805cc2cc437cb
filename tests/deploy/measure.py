"""Measure the memory and CPU of each service in a running mesh: `python -m tests.deploy.measure`. The resource requests
are based on it.

The mesh is the one of the Kubernetes manifests, as processes (`pods`), with the fake engine and trainer and real
sandbox sessions.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import psutil

from .pods import Pod
from .test_mesh_from_manifests import EVERY, NODES, TRAINED_S, prepared, running

UPDATES = 8


async def measure(folder: Path) -> None:
    pods = prepared(folder, updates_max=UPDATES, batch_groups=8, group_size=8)
    async with running(pods, *EVERY) as mesh:
        await asyncio.gather(*(mesh[name].until_ready() for name in NODES))
        before = {name: _used(pod) for name, pod in mesh.items()}
        clock = asyncio.get_running_loop().time
        began, peak = clock(), dict.fromkeys(mesh, 0)
        async with asyncio.timeout(TRAINED_S):
            while mesh["learner-0"].process.returncode is None:
                after = {name: _used(pod) for name, pod in mesh.items() if pod.process.returncode is None}
                peak |= {name: max(peak[name], memory) for name, (_, memory) in after.items()}
                await asyncio.sleep(0.5)
        wall_s = clock() - began
        after = {name: _used(pod) for name, pod in mesh.items() if pod.process.returncode is None}
    print(f"{UPDATES} updates in {wall_s:.0f} s")
    for name in mesh:
        cpu_s = after[name][0] - before[name][0] if name in after else float("nan")
        print(f"{name:14} {peak[name] / 2**20:6.0f} MiB  {1000 * cpu_s / wall_s:6.0f} m")


def _used(pod: Pod) -> tuple[float, int]:
    """Return (CPU seconds, bytes of memory) of a process and all below it; zero after its exit."""
    try:
        own = psutil.Process(pod.process.pid)
        every = [own, *own.children(recursive=True)]
        times = [one.cpu_times() for one in every]
        return sum(t.user + t.system for t in times), sum(one.memory_info().rss for one in every)
    except psutil.NoSuchProcess:
        return 0.0, 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(measure(Path(scratch)))
