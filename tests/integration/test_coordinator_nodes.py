"""Nodes at the coordinator: joining, draining, dying, weight commands, cancelled episodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.services.coordinator import servicer
from rollmesh.shared.errors import (
    InvalidInput,
    NodeDraining,
    NotReady,
    UnknownNode,
)
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import types_pb2

from .coordinator_mesh import CONFIG, DEPOT, ROLLOUT, WORKER, MeshParts, coordinator_mesh, eventually, stream_of


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[MeshParts]:
    async with coordinator_mesh(tmp_path) as parts:
        yield parts


async def join(mesh: MeshParts, hello: pb.NodeHello) -> Any:
    call = mesh.coordinator.Join()
    await call.write(pb.JoinRequest(hello=hello))
    return call


async def test_a_node_is_welcomed_with_the_picture_of_the_fleet(mesh: MeshParts) -> None:
    call = await join(mesh, pb.NodeHello(node_id="w1", kind=ROLLOUT))
    welcome, fleet = (await call.read()).welcome, (await call.read()).fleet
    assert welcome.heartbeat_s == CONFIG.fleet.heartbeat_s
    assert welcome.coordinator_id
    assert DEPOT in {node.kind for node in fleet.nodes}
    call.cancel()


async def test_joining_again_replaces_the_older_stream(mesh: MeshParts) -> None:
    first = await join(mesh, pb.NodeHello(node_id="w1", kind=ROLLOUT))
    assert (await first.read()).HasField("welcome")
    second = await join(mesh, pb.NodeHello(node_id="w1", kind=ROLLOUT))
    assert (await second.read()).HasField("welcome")
    async with asyncio.timeout(5):
        while await first.read():
            pass
    await mesh.call(mesh.coordinator.Drain, pb.DrainRequest(node_id="w1"))
    async with asyncio.timeout(5):
        while not (message := await second.read()).HasField("drain"):
            assert message, "the live stream must not end"
    second.cancel()


async def test_a_node_that_is_not_connected_cannot_be_drained(mesh: MeshParts) -> None:
    """It would join again without the command, and the operator would wait for it to leave."""
    call = await join(mesh, pb.NodeHello(node_id="w1", kind=ROLLOUT))
    assert (await call.read()).HasField("welcome")
    call.cancel()

    async def rejected() -> bool:
        try:
            await mesh.call(mesh.coordinator.Drain, pb.DrainRequest(node_id="w1"))
        except NotReady as error:
            return "not connected" in str(error)
        return False

    await eventually(rejected)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.JoinRequest(report=pb.NodeReport()), "hello"),
        (pb.JoinRequest(hello=pb.NodeHello(kind=ROLLOUT)), "hello.node_id"),
        (pb.JoinRequest(hello=pb.NodeHello(node_id="n")), "hello.kind"),
        (pb.JoinRequest(hello=pb.NodeHello(node_id="n", kind=DEPOT)), "hello.address"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
async def test_a_hello_that_says_too_little_is_refused(mesh: MeshParts, request_: pb.JoinRequest, field: str) -> None:
    call = mesh.coordinator.Join(stream_of(request_))
    with pytest.raises(InvalidInput) as caught, typed_errors():
        async for _ in call:
            pass
    assert caught.value.violations[0].field == field


async def test_work_is_for_nodes_that_joined_and_do_not_drain(mesh: MeshParts) -> None:
    await mesh.begin()
    ask = mesh.coordinator.AcquireRollouts
    with pytest.raises(UnknownNode):
        await mesh.call(ask, pb.AcquireRolloutsRequest(node_id="stranger", num_max=1))
    with pytest.raises(UnknownNode):
        await mesh.call(mesh.coordinator.Drain, pb.DrainRequest(node_id="stranger"))
    await mesh.call(mesh.coordinator.Drain, pb.DrainRequest(node_id=WORKER))
    with pytest.raises(NodeDraining) as caught:
        await mesh.call(ask, pb.AcquireRolloutsRequest(node_id=WORKER, num_max=1))
    assert (caught.value.code.name, caught.value.reason) == ("FAILED_PRECONDITION", "DRAINING")


async def test_a_silent_workers_episodes_go_to_others(tmp_path: Path) -> None:
    fleet = msgspec.structs.replace(CONFIG.fleet, suspect_after_s=2.0, dead_after_s=3.0)
    async with coordinator_mesh(tmp_path, msgspec.structs.replace(CONFIG, fleet=fleet)) as mesh:
        await mesh.begin()
        call = await join(mesh, pb.NodeHello(node_id="w1", kind=ROLLOUT))
        request = pb.AcquireRolloutsRequest(node_id="w1", num_max=1, wait_s=10)
        (lease,) = (await mesh.call(mesh.coordinator.AcquireRollouts, request)).leases
        call.cancel()
        leases = []

        async def returned() -> bool:
            leases.extend(await mesh.acquire(1, wait_s=0.1))
            return lease.key.episode in {one.key.episode for one in leases}

        await eventually(returned)
        again = next(one for one in leases if one.key.episode == lease.key.episode)
        assert again.key.attempt == 2
        late = await mesh.finished(lease, step=0)
        assert await mesh.report([late]) == ["UNKNOWN_LEASE"]


async def test_an_expired_episode_is_cancelled_at_its_worker(mesh: MeshParts) -> None:
    await mesh.begin(episode_lease_s=0.2)
    call = await join(mesh, pb.NodeHello(node_id="w1", kind=ROLLOUT))
    request = pb.AcquireRolloutsRequest(node_id="w1", num_max=1, wait_s=10)
    (lease,) = (await mesh.call(mesh.coordinator.AcquireRollouts, request)).leases
    async with asyncio.timeout(10):
        while not (message := await call.read()).HasField("cancel"):
            pass
    assert list(message.cancel.lease_ids) == [lease.lease_id]
    assert message.cancel.reason == "LEASE_EXPIRED"
    call.cancel()


async def test_a_published_version_is_prepared_then_activated_by_an_inference_node(mesh: MeshParts) -> None:
    kind = pb.NODE_KIND_INFERENCE
    call = await join(mesh, pb.NodeHello(node_id="i0", kind=kind, address="127.0.0.1:1", capacity=1))
    await mesh.begin()
    done = {
        pb.WeightCommand.VERB_PREPARE: pb.WeightReport.PHASE_PREPARED,
        pb.WeightCommand.VERB_ACTIVATE: pb.WeightReport.PHASE_ACTIVE,
    }
    seen: list[int] = []
    async with asyncio.timeout(10):
        while len(seen) < 2:
            command = (await call.read()).weights
            if command.verb:
                seen.append(command.verb)
                assert command.version.step == 0
                assert command.sources
                report = pb.WeightReport(version=command.version, phase=done[command.verb])
                await call.write(pb.JoinRequest(report=pb.NodeReport(weights=[report])))
    assert seen == [pb.WeightCommand.VERB_PREPARE, pb.WeightCommand.VERB_ACTIVATE]
    await mesh.wait_ready(kind)
    call.cancel()


async def test_a_version_that_fails_its_probes_is_quarantined(mesh: MeshParts) -> None:
    hello = pb.NodeHello(node_id="i0", kind=pb.NODE_KIND_INFERENCE, address="127.0.0.1:1", capacity=1)
    call = await join(mesh, hello)
    await mesh.begin()
    async with asyncio.timeout(10):
        while not (command := (await call.read()).weights).verb:
            pass
    failure = types_pb2.Failure(reason="PROBE_MISMATCH", message="off by 3 nats")
    report = pb.WeightReport(version=command.version, phase=pb.WeightReport.PHASE_PROBE_MISMATCH, failure=failure)
    await call.write(pb.JoinRequest(report=pb.NodeReport(weights=[report])))

    async def quarantined() -> bool:
        assert mesh.node is not None
        driver = await mesh.node.runs.get("r")
        return bool(await driver.read(lambda core, _: core.state.the_clock.quarantined))

    await eventually(quarantined)
    fleet = await mesh.call(mesh.coordinator.GetFleet, pb.GetFleetRequest(kind=pb.NODE_KIND_INFERENCE))
    assert fleet.nodes[0].state == pb.NODE_STATE_QUARANTINED
    assert fleet.nodes[0].cause == "off by 3 nats"
    call.cancel()


async def test_a_fleet_beyond_a_response_is_cut_and_its_live_nodes_come_first(
    mesh: MeshParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    num, calls = 5, []
    for number in range(num):
        hello = pb.NodeHello(node_id=f"i{number}", kind=pb.NODE_KIND_INFERENCE, address="127.0.0.1:1", capacity=1)
        calls.append(await join(mesh, hello))
        if number in (1, 3):
            await calls[-1].write(pb.JoinRequest(report=pb.NodeReport(leaving=True)))
    request = pb.GetFleetRequest(kind=pb.NODE_KIND_INFERENCE)

    async def left() -> bool:
        nodes = (await mesh.call(mesh.coordinator.GetFleet, request)).nodes
        return [node.state for node in nodes].count(pb.NODE_STATE_DEAD) == 2

    await eventually(left)
    whole = await mesh.call(mesh.coordinator.GetFleet, request)
    assert (len(whole.nodes), whole.num_omitted) == (num, 0)
    monkeypatch.setattr(servicer, "FLEET_BYTES_MAX", whole.ByteSize() * 4 // num)
    cut = await mesh.call(mesh.coordinator.GetFleet, request)
    assert len(cut.nodes) + cut.num_omitted == num
    assert {"i0", "i2", "i4"} <= {node.node_id for node in cut.nodes}
    assert cut.num_omitted in (1, 2)
