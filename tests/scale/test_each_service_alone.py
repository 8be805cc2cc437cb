"""Each service that can be scaled has its own bottleneck, and only more nodes of that service move it.

Four meshes, each with one service that takes 0.25 s of waiting for an episode and serves four at once, so that one node
finishes at most 16 episodes per second. The capacity is a number of slots and not processor time, so the result does
not depend on the host. In each mesh, a second node of each service is added alone, and drained again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.mesh import Mesh
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import coordinator_pb2_grpc, run_pb2, run_pb2_grpc

from ..chaos.world import save_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SERVICES = ("rollout", "inference", "sandbox", "reward")
SLOTS, HOLD_S = 4, 0.25
BATCH_SAMPLES = 8
SETTLE_S, WINDOW_S = 1.5, 5.0
JOIN_S = 60.0
AGENT = """
import asyncio


class Agent:
    async def run(self, task, env):
        await env.generate()
        if {tool}:
            await env.tool("calculator", "1+1")
        await asyncio.sleep({hold_s})
"""
SANDBOX = """
import asyncio

from rollmesh.testing.fake_sandbox import FakeSandboxEngine


class Slow(FakeSandboxEngine):
    async def call_all(self, session_id, calls, slice_s):
        await asyncio.sleep({hold_s})
        return await super().call_all(session_id, calls, slice_s)
"""
SCORER = """
import asyncio


class Scorer:
    async def score(self, item):
        await asyncio.sleep({hold_s})
        return 1.0
"""


def config(folder: Path, slow: str) -> MeshConfig:
    """Return the configuration in which the service `slow` is the bottleneck."""
    (folder / "agent.py").write_text(AGENT.format(tool=slow == "sandbox", hold_s=HOLD_S if slow == "rollout" else 0.0))
    (folder / "sandbox.py").write_text(SANDBOX.format(hold_s=HOLD_S))
    (folder / "scorer.py").write_text(SCORER.format(hold_s=HOLD_S if slow == "reward" else 0.0))

    def slots(service: str) -> int:
        return SLOTS if service == slow else 16 * SLOTS

    engine = {"slots_max": slots("inference"), "step_s": HOLD_S / 5 if slow == "inference" else 0.0}
    tree: dict[str, Any] = {
        "run": {
            "name": "scaled", "max_staleness": 16, "admit_early": True, "batch_groups": 2, "group_size": BATCH_SAMPLES // 2, "publish_every": 8,
            "updates_max": 0, "eval_every": 0, "tries_max": 50,
        },
        "data": {"source": {"name": "calc", "options": {"level_max": 2}}},
        "inference": {
            "engine": {"name": "rollmesh.testing.fake_engine:FakeEngine", "options": {"vocab_size": 112, **engine}},
            "capacity": slots("inference"),
        },
        "rollout": {
            "agent": "agent.py:Agent", "model_dir": "model", "sampling": {"max_tokens": 40},
            "worker": {"episodes_max": slots("rollout")},
            "reward": {"batch_max": 1, "inflight_max": 64},  # a batch ends at once, and bursts would blur the rate
        },
        "sandbox": {"engine": "sandbox.py:Slow", "shared": {"sessions_max": slots("sandbox"), "calls_at_once": 1}},
        "reward": {
            "scorers": [{"name": "scorer.py:Scorer", "reward": "correct"}], "finalizers": ["keep_all"],
            "concurrency_max": slots("reward"),
        },
        "learner": {"engine": "fake", "checkpoint_every": 1000, "tensorboard": False},
    }  # fmt: skip
    return config_from_dict(MeshConfig, tree)


class Load:
    """A mesh under load, seen from its gateway."""

    def __init__(self, mesh: Mesh, channel: Any) -> None:
        self.mesh = mesh
        self._runs: Any = run_pb2_grpc.RunServiceStub(channel)
        self._fleet: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)

    async def rate(self) -> float:
        """Return the samples that are scored per second."""
        await asyncio.sleep(SETTLE_S)
        begin, begin_s = await self.scored(), time.monotonic()
        await asyncio.sleep(WINDOW_S)
        return (await self.scored() - begin) / (time.monotonic() - begin_s)

    async def scored(self) -> float:
        """Return the number of scored samples, from their tokens and the mean length of trained ones; 0 before the
        first update."""
        with typed_errors():
            state = (await self._runs.GetRun(run_pb2.GetRunRequest(run="scaled"))).state
        if not state.policies or not state.policies[0].applied_step:
            return 0.0
        policy = state.policies[0]
        return float(policy.tokens_generated * policy.applied_step * BATCH_SAMPLES / policy.tokens_trained)

    @asynccontextmanager
    async def second(self, service: str) -> AsyncIterator[None]:
        """Add a second node of a service; drain it at the end."""
        name = f"{service}-1"
        await self.mesh.start(name)
        async with asyncio.timeout(JOIN_S):
            while pb.NODE_STATE_READY not in await self._states(name):  # noqa: ASYNC110 (the coordinator decides)
                await asyncio.sleep(0.05)
        yield
        with typed_errors():
            await self._fleet.Drain(pb.DrainRequest(node_id=name))
        async with asyncio.timeout(JOIN_S):
            await self.mesh.service(name).wait()
        await self.mesh.stop(name)

    async def _states(self, name: str) -> list[int]:
        with typed_errors():
            nodes = (await self._fleet.GetFleet(pb.GetFleetRequest())).nodes
        return [node.state for node in nodes if node.node_id == name]


@pytest.mark.parametrize("slow", SERVICES)
async def test_only_more_nodes_of_the_bottleneck_raise_the_rate(tmp_path: Path, slow: str) -> None:
    save_model_folder(tmp_path / "model")
    async with (
        Mesh(config(tmp_path, slow), run_dir=tmp_path / "run", base_dir=tmp_path) as mesh,
        open_channel(mesh.gateway_address, access=mesh.access) as channel,
    ):
        load = Load(mesh, channel)
        async with asyncio.timeout(JOIN_S):
            while not await load.scored():  # noqa: ASYNC110 (other tasks train)
                await asyncio.sleep(0.05)
        one, two = await load.rate(), {}
        for service in SERVICES:
            async with load.second(service):
                two[service] = await load.rate()
    shown = "  ".join(f"{service} {rate:5.1f}" for service, rate in two.items())
    print(f"\nbottleneck {slow:9}  one node each {one:5.1f}  two of: {shown}  samples/s")
    assert one == pytest.approx(SLOTS / HOLD_S, rel=0.25), "one node serves four episodes in 0.25 s"
    for service, rate in two.items():
        assert rate / one > 1.4 if service == slow else 0.75 < rate / one < 1.3, (service, rate, one)
