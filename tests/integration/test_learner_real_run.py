"""The learner against the real gateway, coordinator, depot and nats-server; the test is the worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from rollmesh.client import RunAddress
from rollmesh.services.learner.config import LearnerConfig, LearnerRetryConfig
from rollmesh.services.learner.fault_points import LearnerFaultPoint
from rollmesh.services.learner.node import LearnerNode
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.codec.metadata import sample_meta
from rollmesh.shared.codec.trajectory import decode_key, encode_episode
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import MeshError
from rollmesh.shared.process.fault_points import Hook, noop
from rollmesh.trainer.checkpoint_files import list_checkpoints
from rollmesh.trainer.trained_log import read_trained
from rollmesh.v1 import coordinator_pb2, run_pb2, types_pb2

from .coordinator_mesh import ACCESS, MeshParts, coordinator_mesh
from .learner_world import episode

UPDATES = 10


class Killed(Exception):
    """The learner ends here."""


async def report_of(mesh: MeshParts, lease: coordinator_pb2.EpisodeLease) -> coordinator_pb2.EpisodeReport:
    """A whole episode by the weights that are published now: its payload in the stream, and its report."""
    (policy,) = (await mesh.state()).policies
    key = decode_key(lease.key)
    made = episode(key.group, key.attempt, steps=(max(0, policy.published_step),), reward=float(key.episode[-1] == "0"))
    version = PolicyVersion(policy="main", step=max(0, policy.published_step), incarnation=policy.incarnation)
    segments = (made.segments[0], replace(made.segments[1], version=version))
    sample = replace(made.samples[0], sample_id=f"{key.episode}.0")
    made = replace(made, key=key, segments=segments, samples=(sample,))
    message = encode_episode(made)
    payload = message.SerializeToString()
    stream = await mesh.bus.open(run_streams(key.run).samples.name)
    sequence = await stream.append(payload, msg_id=f"{key.episode}.{key.attempt}")
    return coordinator_pb2.EpisodeReport(
        lease_id=lease.lease_id,
        key=lease.key,
        outcome=coordinator_pb2.EPISODE_OUTCOME_COMPLETED,
        payload=types_pb2.PayloadRef(sequence=sequence, size_bytes=len(payload)),
        samples=[sample_meta(message, message.samples[0])],
    )


async def work(mesh: MeshParts) -> None:
    """Runs whatever is admitted; a coordinator that is away is asked again."""
    while True:
        with contextlib.suppress(MeshError):
            leases = await mesh.acquire(8, wait_s=1.0)
            await mesh.report([await report_of(mesh, lease) for lease in leases])


@asynccontextmanager
async def run_with_worker(tmp_path: Path) -> AsyncIterator[MeshParts]:
    async with coordinator_mesh(tmp_path) as mesh:
        await mesh.create(updates_max=UPDATES)
        worker = asyncio.create_task(work(mesh))
        try:
            yield mesh
        finally:
            worker.cancel()
            await asyncio.wait([worker])


def learner(mesh: MeshParts, folder: Path, *, at: Hook = noop) -> LearnerNode:
    assert mesh.gateway is not None
    config = LearnerConfig(
        directory=str(folder / "learner"),
        engine=Extension("fake"),
        checkpoint_every=2,
        tensorboard=False,
        retry=LearnerRetryConfig(retry_s=10.0, backoff_s=0.01, backoff_s_max=0.1),
    )
    where = RunAddress(address=mesh.gateway.address, access=ACCESS, run="r", holder="test")
    return LearnerNode(config, where, at=at, coordinator=mesh.address)


async def check_history(mesh: MeshParts, folder: Path) -> None:
    """The ledger's accounts and the list in the newest checkpoint are of one history, without a sample twice."""
    state = await mesh.state()
    (policy,) = state.policies
    lines = list(read_trained(list_checkpoints(folder / "learner" / "checkpoints")[-1] / "trained.jsonl"))
    used = [sample for line in lines for sample in line.sample_ids]
    assert len(used) == len(set(used)) > 0
    assert (policy.applied_step, policy.checkpoint_update, policy.published_step) == (UPDATES, UPDATES, UPDATES)
    assert (lines[-1].update, lines[-1].digest) == (UPDATES, policy.digest)
    assert state.samples.trained == len(used)
    ends = ("trained", "stale", "filtered", "failed", "cancelled", "exported")
    assert state.samples.reserved == state.samples.live + sum(getattr(state.samples, end) for end in ends)


async def test_a_learner_killed_once_at_every_moment_trains_each_sample_once(tmp_path: Path) -> None:
    async with run_with_worker(tmp_path) as mesh, asyncio.timeout(60):
        for moment in LearnerFaultPoint:
            num_seen = 0

            async def at(now: LearnerFaultPoint, moment: LearnerFaultPoint = moment) -> None:
                nonlocal num_seen
                num_seen += now is moment
                if num_seen == (
                    2 if moment is LearnerFaultPoint.PUBLISHED else 1
                ):  # the first is the one after the attach
                    raise Killed

            async with learner(mesh, tmp_path, at=at) as node:
                with pytest.raises(Killed):
                    await node.wait()
        async with learner(mesh, tmp_path) as node:
            await node.wait()
        await check_history(mesh, tmp_path)


async def test_a_coordinator_that_restarts_in_mid_run_costs_no_update(tmp_path: Path) -> None:
    async with run_with_worker(tmp_path) as mesh, asyncio.timeout(60):
        restarted = False

        async def at(now: LearnerFaultPoint) -> None:
            nonlocal restarted
            if now is LearnerFaultPoint.STEPPED and node.progress.update == 3 and not restarted:
                restarted = True
                await mesh.restart_coordinator()

        async with learner(mesh, tmp_path, at=at) as node:
            await node.wait()
        assert restarted
        assert (node.progress.num_attached, node.progress.last_error) == (1, "")
        await check_history(mesh, tmp_path)


async def test_stopping_the_run_ends_the_learner_with_its_last_update_kept(tmp_path: Path) -> None:
    async with run_with_worker(tmp_path) as mesh, asyncio.timeout(60):
        stopping: list[asyncio.Task[object]] = []

        async def at(now: LearnerFaultPoint) -> None:
            if now is LearnerFaultPoint.COMMITTED and node.progress.update == 3:
                request = run_pb2.StopRunRequest(run="r", reason="enough")
                stopping.append(asyncio.create_task(mesh.call(mesh.run.StopRun, request)))

        async with learner(mesh, tmp_path, at=at) as node:
            await node.wait()
        await stopping[0]
        (policy,) = (await mesh.state()).policies
        assert (
            policy.applied_step == policy.checkpoint_update == policy.published_step == node.progress.update < UPDATES
        )
