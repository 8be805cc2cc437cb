"""Nodes join and leave a running mesh with `rollmesh serve --join` and `rollmesh drain`. The run adapts, and no sample
is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.mesh.config import MeshConfig
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.ledger import read_ledger
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import inference_pb2, inference_pb2_grpc

from .joined import at, command, joined
from .verdict import settle
from .world import World, mesh_config, save_model_folder, world

ONE_NODE = {
    "nats": ("nats",),
    "coordinator": ("coordinator",),
    "rest": ("gateway", "depot", "reward", "data", "sandbox-0"),
    "inference-0": ("inference-0",),
    "rollout-0": ("rollout-0",),
    "learner": ("learner",),
}
STEP_S = 90.0
WINDOW_TOKENS = 1500
"""Seconds per measurement of throughput."""
JOINING, READY, DEAD = pb.NODE_STATE_JOINING, pb.NODE_STATE_READY, pb.NODE_STATE_DEAD


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("model"))


def slow_engines(model: Path, **run: Any) -> MeshConfig:
    """A run that is limited by the engines, so that it becomes faster with more of them."""
    config = mesh_config(model, **{"batch_groups": 6, "group_size": 4, **run})
    options: dict[str, Any] = {
        "vocab_size": 112,
        "slots_max": 12,
        "tokens_per_step": 1,
        "step_s": 0.03,
        "prepare_s": 0.3,
    }
    engine = msgspec.structs.replace(config.inference.engine, options=options)
    inference = msgspec.structs.replace(config.inference, engine=engine, capacity=options["slots_max"])
    counts = msgspec.structs.replace(config.counts, inference=1)
    return msgspec.structs.replace(config, inference=inference, counts=counts)


async def tokens_of(mesh: World, nodes: Sequence[pb.FleetNode]) -> dict[str, int]:
    """Return the number of tokens that each node has generated since its start."""
    found = {}
    for node in nodes:
        async with open_channel(node.address, access=mesh.layout.access) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            load = await stub.GetLoad(inference_pb2.GetLoadRequest(), timeout=10.0)
            found[node.node_id] = load.tokens_generated
    return found


async def engines(mesh: World) -> list[pb.FleetNode]:
    return [n for n in await mesh.fleet() if n.kind == pb.NODE_KIND_INFERENCE and n.state == READY]


async def throughput(mesh: World) -> tuple[float, dict[str, int]]:
    """Return tokens per second over a window, and the number of each engine."""
    nodes = await engines(mesh)
    before, begin_s = await tokens_of(mesh, nodes), time.monotonic()
    while True:
        now = await tokens_of(mesh, nodes)
        made = {name: now[name] - before[name] for name in now}
        if sum(made.values()) >= WINDOW_TOKENS * len(nodes):
            return sum(made.values()) / (time.monotonic() - begin_s), made
        assert time.monotonic() - begin_s < STEP_S, mesh.logs()
        await asyncio.sleep(0.05)


async def ledger(mesh: World) -> list[f.Fact]:
    """Return every fact of the run, in order."""
    port = (mesh.layout.folder("nats") / "port").read_text().strip()
    bus = await JetStreamBus.connect(f"nats://127.0.0.1:{port}", login=BusLogin.of(mesh.layout.access))
    try:
        log = await bus.open(run_streams(mesh.layout.run).ledger.name)
        return [fact async for record in read_ledger(log) for fact in record.facts]
    finally:
        await bus.close()


@pytest.mark.timeout(400)
@pytest.mark.slow
async def test_inference_nodes_join_and_leave_and_the_throughput_follows(tmp_path: Path, model: Path) -> None:
    async with world(tmp_path, slow_engines(model, updates_max=45), ONE_NODE) as mesh:
        await mesh.until_state("the first update", lambda s: s.policies[0].applied_step >= 1, limit_s=STEP_S)
        one, _ = await throughput(mesh)
        async with (
            joined(mesh, tmp_path, "inference", "a") as first,
            joined(mesh, tmp_path, "inference", "b") as second,
        ):
            for node in (first, second):
                assert (await node.until(READY)).active.step >= 0
            three, made = await throughput(mesh)
            assert set(made) == {"inference-0", "inference-a", "inference-b"}
            assert min(made.values()) > WINDOW_TOKENS / 4, made
            assert three > 1.5 * one
            assert [await first.drain(), await second.drain()] == [0, 0]
            gone = [await first.until(DEAD), await second.until(DEAD)]
            assert {node.cause for node in gone} == {"left cleanly"}
        again, made = await throughput(mesh)
        assert set(made) == {"inference-0"}
        assert again < three / 1.5
        verdict = await settle(mesh, updates=45, limit_s=240.0)
    assert verdict.audit.samples.failed == 0
    assert mesh.exits == [("learner", 0)]


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_a_killed_node_that_comes_back_serves_only_once_it_has_admissible_weights(
    tmp_path: Path, model: Path
) -> None:
    async with (
        world(tmp_path, slow_engines(model, updates_max=30), ONE_NODE) as mesh,
        joined(mesh, tmp_path, "inference", "a") as node,
    ):
        await mesh.until_state("a first version", lambda s: s.policies[0].published_step >= 0, limit_s=STEP_S)
        before = await node.until(READY)
        await mesh.until_state("some updates", lambda s: s.policies[0].applied_step >= 5, limit_s=STEP_S)
        node.kill()
        assert await node.ended() == -signal.SIGKILL
        await node.start()
        back = await node.until(JOINING)
        assert back.address != before.address
        assert not back.HasField("active")
        back = await node.until(READY)
        applied = (await mesh.until_state("its state", lambda s: True, limit_s=STEP_S)).policies[0].applied_step
        assert back.active.step >= applied - 2 - 1, "admissible when it was looked at, an update earlier at most"
        await settle(mesh, updates=30, limit_s=200.0)


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_a_vanished_worker_s_episodes_are_run_by_others_and_a_drained_one_finishes_its_own(
    tmp_path: Path, model: Path
) -> None:
    async with world(tmp_path, slow_engines(model, updates_max=20), ONE_NODE) as mesh:
        async with (
            joined(mesh, tmp_path, "rollout", "dies") as dies,
            joined(mesh, tmp_path, "rollout", "leaves") as leaves,
        ):
            await mesh.until_state("the first update", lambda s: s.policies[0].applied_step >= 1, limit_s=STEP_S)
            for node in (dies, leaves):
                await _until_working(node.name, mesh)
            dies.kill()
            assert await leaves.drain() == 0
            verdict = await settle(mesh, updates=20, limit_s=200.0)
        facts = await ledger(mesh)
    assert returned_by(facts) == {"rollout-dies"}, "given to others: those of the dead worker, and no others"
    assert any(isinstance(fact, f.EpisodeLeased) and fact.node_id == "rollout-leaves" for fact in facts)
    assert verdict.audit.samples.failed == 0


def returned_by(facts: Sequence[f.Fact]) -> set[str]:
    """Return the workers whose leases were revoked or released."""
    holder: dict[tuple[str, str], str] = {}
    found = set()
    for fact in facts:
        if isinstance(fact, f.EpisodeLeased):
            holder[fact.group, fact.episode] = fact.node_id
        elif isinstance(fact, f.EpisodeReturned):
            found.add(holder[fact.group, fact.episode])
    return found


async def _until_working(node_id: str, mesh: World) -> None:
    async with asyncio.timeout(STEP_S):
        while not any(n.node_id == node_id and n.num_running for n in await mesh.fleet()):  # noqa: ASYNC110 (another process)
            await asyncio.sleep(0.05)


@pytest.mark.timeout(300)
@pytest.mark.slow
async def test_the_data_plane_goes_on_while_the_coordinator_is_away(tmp_path: Path, model: Path) -> None:
    """Once paused for part of a lease, once killed: no running episode is lost."""
    async with world(tmp_path, slow_engines(model, updates_max=20, episode_lease_s=20.0), ONE_NODE) as mesh:
        await mesh.until_state("the first update", lambda s: s.policies[0].applied_step >= 1, limit_s=STEP_S)
        nodes = await engines(mesh)
        pid = mesh.pids["coordinator"]
        before = await tokens_of(mesh, nodes)
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(10.0):  # half of a lease
                while sum((await tokens_of(mesh, nodes)).values()) - sum(before.values()) < 500:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            os.kill(pid, signal.SIGCONT)
        seen = await mesh.until_state("it is back", lambda s: True, limit_s=STEP_S)
        reached = seen.policies[0].applied_step + 2
        await mesh.until_state("updates go on", lambda s: s.policies[0].applied_step >= reached, limit_s=STEP_S)
        mesh.kill("coordinator")
        await settle(mesh, updates=20, limit_s=200.0)
        returned = [fact for fact in await ledger(mesh) if isinstance(fact, f.EpisodeReturned)]
    assert not returned, "every episode in flight ended where it ran, and was reported"


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_status_tells_fleet_versions_and_accounts_through_one_address(tmp_path: Path, model: Path) -> None:
    async with world(tmp_path, slow_engines(model, updates_max=0), ONE_NODE) as mesh:
        await mesh.until_state("the first update", lambda s: s.policies[0].applied_step >= 1, limit_s=STEP_S)
        code, said = await command(mesh, "status", *at(mesh), "--json")
        assert code == 0, said
        found = json.loads(said)
        nodes = {node["node_id"]: node for node in found["nodes"]}
        assert set(nodes) >= {"inference-0", "rollout-0", "gateway", "depot", "reward", "data", "sandbox-0", "learner"}
        assert nodes["inference-0"]["state"] == "NODE_STATE_READY"
        (run,) = found["runs"]
        assert int(run["policies"][0]["applied_step"]) >= 1
        assert int(run["leases"]["episodes_leased"]) > 0
        code, said = await command(mesh, "status", *at(mesh))
        assert code == 0, said
        assert "inference-0" in said
        assert "reserved = " in said
        code, said = await command(mesh, "drain", "unknown-9", *at(mesh))
        assert (code, said.count("\n")) == (1, 1), said
        assert "unknown-9" in said
