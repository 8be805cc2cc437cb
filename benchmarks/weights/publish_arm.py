"""One process of the bench `publish_to_active`: the demo in a mesh, with the times of its commits and a generating
client beside it.

`python -m benchmarks.weights.publish_arm` reads a `PublishWork` as JSON from stdin and writes a `PublishSeen`. It is a
separate process, because interpreter settings and heaps of one mesh would affect the next.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import msgspec
import yaml

from benchmarks.weights.publish_client import Arrival, TimedClientWork
from rollmesh.mesh import Mesh
from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.host import HostOptions, run_host
from rollmesh.mesh.run_layout import RunLayout
from rollmesh.mesh.supervisor import CONFIG_FILE, Supervisor, all_services
from rollmesh.services.learner.fault_points import LearnerFaultPoint
from rollmesh.services.learner.metrics_log import read_metrics
from rollmesh.shared.config.loader import config_from_dict

CLIENT_S_MAX = 30.0
REQUEST_TOKENS = 256


class PublishWork(msgspec.Struct, frozen=True, kw_only=True):
    """One mesh."""

    config: str
    """File of the configuration of `rollmesh train`."""
    model: str
    """Folder of the initial model."""
    folder: str
    mode: Literal["one process", "learner apart", "processes"]
    """`learner apart`: as `rollmesh demo` runs, the learner in one process and all other services in another."""
    kv: Literal["keep", "recompute"]
    updates: int
    on_policy: bool
    """`run.max_staleness` 0: after a commit nothing is trained, and only the client generates until the weights are
    announced."""


class PublishSeen(msgspec.Struct, frozen=True, kw_only=True):
    """The times of one mesh, in seconds on the monotonic clock of the host."""

    stepped: list[float]
    """End of the computation of update 1, 2, ..., before its commit."""
    committed: list[float]
    """Commit of update 1, 2, ..."""
    announced: list[float]
    """Announcement of the weights of update 0, 1, ..."""
    seconds: list[dict[str, float]]
    """Seconds of the learner by phase in update 1, 2, ..."""
    arrivals: list[Arrival]


def arm_config(work: PublishWork) -> MeshConfig:
    """Return the demo without evaluations and checkpoints. Every token leaves the engine at once."""
    values = yaml.safe_load(Path(work.config).read_text())
    values.pop("made_model", None)
    values["model"] = work.model
    values["run"] |= {"updates_max": work.updates, "eval_every": 0}
    if work.on_policy:
        values["run"]["max_staleness"] = 0
    values["learner"] |= {"checkpoint_every": work.updates + 1}
    values["inference"]["kv"] = work.kv
    values["inference"]["engine"]["options"]["flush_tokens"] = 1
    return config_from_dict(MeshConfig, values)


class Marks:
    """The hook of the learner that records times."""

    def __init__(self) -> None:
        self.times: dict[LearnerFaultPoint, list[float]] = {}

    async def at(self, point: LearnerFaultPoint) -> None:
        self.times.setdefault(point, []).append(time.monotonic())


@asynccontextmanager
async def _client(layout: RunLayout, arrivals: list[Arrival]) -> AsyncIterator[None]:
    """Generate meanwhile; then fill `arrivals`."""
    command = [sys.executable, "-m", "benchmarks.weights.publish_client"]
    client = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 30
    )
    work = TimedClientWork(coordinator=layout.coordinator, token=layout.access.token, max_tokens=REQUEST_TOKENS)
    assert client.stdin is not None
    client.stdin.write(msgspec.json.encode(work) + b"\n")
    try:
        yield
        async with asyncio.timeout(CLIENT_S_MAX):
            out, _ = await client.communicate(b"")
        arrivals += msgspec.json.decode(out, type=list[Arrival])
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()


async def run_publishing(work: PublishWork) -> PublishSeen:
    """Train, and return what was seen."""
    folder, config, marks = Path(work.folder), arm_config(work), Marks()
    run_dir, options = folder / "run", {"learner": {"at": marks.at}}
    arrivals: list[Arrival] = []
    if work.mode == "one process":
        async with (
            Mesh(config, run_dir=run_dir, base_dir=folder, options=options) as mesh,
            _client(mesh.layout, arrivals),
        ):
            await mesh.finished()
    else:
        names = [name for name in all_services(config) if name != "learner"]
        hosts = {"services": names} if work.mode == "learner apart" else {name: (name,) for name in names}
        host = HostOptions(run_dir=run_dir, config=run_dir / CONFIG_FILE, services=("learner",), base_dir=folder)
        async with (
            Supervisor(config, run_dir=run_dir, base_dir=folder, hosts=hosts) as supervisor,
            _client(supervisor.layout, arrivals),
        ):
            await run_host(host, options)
    lines = read_metrics(run_dir / "metrics.jsonl")
    return PublishSeen(
        stepped=marks.times[LearnerFaultPoint.STEPPED],
        committed=marks.times[LearnerFaultPoint.COMMITTED],
        announced=marks.times[LearnerFaultPoint.PUBLISHED],
        seconds=[lines[update].seconds for update in sorted(lines)],
        arrivals=arrivals,
    )


def main() -> None:
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=PublishWork)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run_publishing(work))) + b"\n")


if __name__ == "__main__":
    main()
