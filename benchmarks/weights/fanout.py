"""Time and traffic of one version on its way from the depot to 1 and to 8 nodes: a part of the bench `weights`.

A real coordinator plans, a real depot serves, and each node is a process (`sink`) with the fetcher and the store of an
inference node, but without engine. Everything is on one host over real gRPC, with a token bucket for the ingress and
the egress of each process.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.cpu_profile import tree_cpu_s
from rollmesh.client import Client
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.mesh import create_run
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.weights.manifest import BuiltManifest, build_manifest, version_owner
from rollmesh.shared.weights.transfer import PIECE_BYTES, upload
from rollmesh.trainer.model_files import WEIGHTS_NAME

SERVICES = ("coordinator", "depot", "reward", "data", "gateway")
LIMIT_S = 240.0
SLOWER = 1.25
"""Time of a lap over that of its links, beyond which the machine was the limit."""
ROOM = 1.2
"""Space that a lap needs, as a multiple of its copies of the weights."""


@dataclass(frozen=True, slots=True)
class FanOut:
    """One version on its way to `nodes` nodes."""

    nodes: int
    num_bytes: int
    """Bytes of the version."""
    rate: float
    """Limit of each link, in bytes per second."""
    wall_s: float
    """From the first command to a node until the last node has all bytes verified."""
    active_s: float
    """From the same moment until the last node has activated the version."""
    egress_bytes: int
    """What the depot sent."""
    received_bytes: int
    """What all nodes received."""
    cpu_s: float
    """CPU of all processes, from the announcement until the last node is active."""

    @property
    def link_s(self) -> float:
        """Time that the links alone take: all bytes in one, and a piece in the two buckets of each further one."""
        return (self.num_bytes + 2 * PIECE_BYTES * (self.nodes - 1)) / self.rate

    @property
    def limit(self) -> str:
        """Whether the lap took the time of its links, or longer, because this machine and what else it runs were
        slower."""
        return "link" if self.wall_s <= SLOWER * self.link_s else "machine"


def fan_out(num_bytes: int, chunk_bytes: int, nodes: int, rate: float) -> FanOut:
    """Send a version of `num_bytes` random bytes to `nodes` nodes at `rate` bytes per second and link."""
    with TemporaryDirectory(prefix="rollmesh-bench-", dir=_roomy(num_bytes * (nodes + 2))) as name:
        folder = Path(name)
        built = build_manifest({WEIGHTS_NAME: _random_weights(folder, num_bytes)}, chunk_bytes=chunk_bytes)
        return asyncio.run(asyncio.wait_for(_measure(folder, built, nodes, rate), LIMIT_S))


def _roomy(num_bytes: int) -> str | None:
    """Return a folder in memory if it has room, so that the disk does not limit the rate; else the usual one for
    temporary files."""
    memory = Path("/dev/shm")
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fits = memory.is_dir() and min(shutil.disk_usage(memory).free, pages) > ROOM * num_bytes
    return str(memory) if fits else None


def _random_weights(folder: Path, num_bytes: int) -> Path:
    """Write a safetensors file of one tensor of random bits, which do not compress."""
    header = json.dumps({"w": {"dtype": "I32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes // 4 * 4]}})
    path, rng = folder / WEIGHTS_NAME, np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        for start in range(0, num_bytes // 4 * 4, 1 << 24):
            file.write(rng.bytes(min(1 << 24, num_bytes // 4 * 4 - start)))
    return path


async def _measure(folder: Path, built: BuiltManifest, nodes: int, rate: float) -> FanOut:
    async with Mesh(_config(rate), run_dir=folder / "run", base_dir=folder, services=SERVICES) as mesh:
        await create_run(mesh.layout)
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        async with (
            Client(mesh.gateway_address, token=mesh.access.token) as client,
            _sinks(mesh, folder, nodes, rate, events),
        ):
            await _each(events, "joined", nodes)
            async with await client.run(mesh.run).attach(keeps_no_checkpoints=True) as trainer:
                async with open_channel(mesh.layout.depot, access=mesh.access) as channel:
                    await upload(channel, built, owner=version_owner(trainer.version, mesh.run))
                cpu_s = tree_cpu_s()
                await trainer.publish_manifest(built)
                begun = await _each(events, "begin", nodes)
                verified = await _each(events, "verified", nodes)
                active = await _each(events, "active", nodes)
                cpu_s = tree_cpu_s() - cpu_s
        start_s = min(event["at_s"] for event in begun)
        return FanOut(
            nodes=nodes,
            num_bytes=sum(source.size_bytes for source in built.chunks.values()),
            rate=rate,
            wall_s=max(event["at_s"] for event in verified) - start_s,
            active_s=max(event["at_s"] for event in active) - start_s,
            egress_bytes=mesh.service("depot").egress.num_bytes,
            received_bytes=sum(event["received"] for event in verified),
            cpu_s=cpu_s,
        )


@asynccontextmanager
async def _sinks(
    mesh: Mesh, folder: Path, nodes: int, rate: float, events: asyncio.Queue[dict[str, Any]]
) -> AsyncIterator[None]:
    """Run the processes of the nodes. Their events go to the queue; the exit of one of them is an event too."""
    module = [sys.executable, "-m", "benchmarks.weights.sink"]
    processes: list[asyncio.subprocess.Process] = []
    readers: list[asyncio.Task[None]] = []
    try:
        for number in range(nodes):
            name = f"sink-{number}"
            options = [name, mesh.layout.coordinator, str(folder / name), str(rate)]
            process = await asyncio.create_subprocess_exec(
                *module, *options, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True
            )  # Linux shares the cores by session, so that other work on the machine slows a node less
            processes.append(process)
            assert process.stdin is not None
            process.stdin.write(f"{mesh.access.token}\n".encode())
            readers.append(asyncio.create_task(_read(name, process, events)))
        yield
    finally:
        for process in processes:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(process.wait() for process in processes), *readers)


async def _read(name: str, process: asyncio.subprocess.Process, events: asyncio.Queue[dict[str, Any]]) -> None:
    assert process.stdout is not None
    async for line in process.stdout:
        events.put_nowait(json.loads(line))
    events.put_nowait({"event": "exit", "node": name})


async def _each(events: asyncio.Queue[dict[str, Any]], event: str, nodes: int) -> list[dict[str, Any]]:
    """Wait until each node has had `event`, and return these events. Other events stay in the queue. Raises
    RuntimeError if a node exits."""
    found: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    while len(found) < nodes:
        one = await events.get()
        if one["event"] == "exit":
            raise RuntimeError(f"{one['node']} exited before its event {event!r}")
        (found if one["event"] == event else others).append(one)
    for one in others:
        events.put_nowait(one)
    return found


def _config(rate: float) -> MeshConfig:
    return config_from_dict(
        MeshConfig,
        {
            "run": {"name": "bench", "updates_max": 0, "eval_every": 0},
            "counts": {"sandbox": 0},
            "depot": {"egress_bytes_per_s": rate, "delta_bytes_max": 0},
            "inference": {"engine": "fake"},
            "learner": {"engine": "fake", "tensorboard": False},
        },
    )  # fmt: skip
