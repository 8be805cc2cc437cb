"""Change the number of nodes of the run in a folder: check the request, pass it to the supervisor, and keep it for a
resume."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from rollmesh.app.config import TrainConfig
from rollmesh.app.mesh_client import FleetClient, call_mesh, find_mesh
from rollmesh.app.run_folder import open_folder
from rollmesh.mesh.mesh_services import service_names
from rollmesh.mesh.run_lock import owner_of
from rollmesh.mesh.scaling import ScaleAnswer, check_counts, request_counts
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.errors import ConfigError, DeadlineExceeded, FailedPrecondition
from rollmesh.v1 import coordinator_pb2 as pb

ANSWER_S = 15.0
POLL_S = 0.5


class NotRunning(FailedPrecondition):
    """No process executes the run; the message has the command that resumes it."""

    reason = "NOT_RUNNING"


def scale_run(run: Path, wanted: Mapping[str, int], *, wait_s: float | None) -> ScaleAnswer:
    """Change the counts of a running mesh. With `wait_s`, wait until the nodes have joined or left. Raises
    MeshError."""
    folder, config, _ = open_folder(run, [])
    is_mesh = folder.read_origin().is_mesh
    if not owner_of(folder.root):
        command = f"rollmesh {'up' if is_mesh else 'train'} {run} " + " ".join(
            f"counts.{kind}={num}" for kind, num in wanted.items()
        )
        raise NotRunning(
            f"{run}: no process executes this {'mesh' if is_mesh else 'run'}; `{command}` resumes it with these counts"
        )
    mesh, clock = find_mesh(run, "", None, []), SystemClock()
    nodes = call_mesh(mesh, lambda client: client.status()).nodes
    counts = check_counts(wanted, config.counts, _others(nodes, config))
    _check_devices(config, counts.inference)
    answer = asyncio.run(request_counts(folder.root, counts, limit_s=ANSWER_S, clock=clock))
    folder.write(msgspec.structs.replace(config, counts=counts), folder.read_origin())
    if wait_s is not None:
        call_mesh(mesh, lambda client: _until_done(client, answer, wait_s, clock))
    return answer


def _others(nodes: Iterable[pb.FleetNode], config: TrainConfig) -> Counter[str]:
    """Return the number of usable nodes by kind that this host has not started."""
    own = set(service_names(config))
    return Counter(
        pb.NodeKind.Name(node.kind).removeprefix("NODE_KIND_").lower()
        for node in nodes
        if node.node_id not in own and node.state in (pb.NODE_STATE_READY, pb.NODE_STATE_STALE, pb.NODE_STATE_JOINING)
    )


def _check_devices(config: TrainConfig, num: int) -> None:
    """Raise ConfigError if there are more inference nodes than CUDA devices for them, because a model fills the memory
    of its device."""
    device = str(config.inference.engine.options.get("device", "cpu"))
    if num <= config.counts.inference or not device.startswith("cuda"):
        return
    import torch

    if num > (found := torch.cuda.device_count()):
        raise ConfigError(
            f"`inference` must be <= {found}, the number of CUDA devices of this host, because "
            "`inference.engine.options.device` is "
            f"{device}; got {num}; add nodes on other hosts (rollmesh serve inference --join HOST:PORT)",
            key="inference",
        )


async def _until_done(client: FleetClient, answer: ScaleAnswer, limit_s: float, clock: SystemClock) -> None:
    """Wait until the nodes have joined or left. Raises DeadlineExceeded."""
    until_s = clock.monotonic_s() + limit_s
    while clock.monotonic_s() < until_s:
        there = {node.node_id for node in (await client.status()).nodes if node.state != pb.NODE_STATE_DEAD}
        missing = [name for name in answer.started if name not in there]
        left = [name for name in answer.draining if name in there]
        if not missing and not left:
            return
        await clock.sleep(POLL_S)
    raise DeadlineExceeded(
        f"after {limit_s:g} s, {', '.join(missing + left)} {'have' if len(missing + left) > 1 else 'has'} not "
        f"{'joined' if missing else 'left'}; `rollmesh status` shows the nodes, logs/NAME.log of the run folder has "
        "the cause"
    )
