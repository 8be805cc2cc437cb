"""The coordinator under loss: restarts, damaged snapshots and ledgers, a killed nats-server, a rival, purged
payloads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.services.coordinator.node import CoordinatorNode
from rollmesh.services.coordinator.recovery import recover
from rollmesh.services.coordinator.snapshots import SnapshotStore, encode_state
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import (
    DataLoss,
    Fenced,
    MeshError,
)
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import run_pb2, run_pb2_grpc
from tests.tamper.ledger_copy import RawRecord, sealed

from .coordinator_mesh import ACCESS, CONFIG, MeshParts, coordinator_mesh, eventually


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[MeshParts]:
    async with coordinator_mesh(tmp_path) as parts:
        yield parts


async def folded(mesh: MeshParts, *, snapshots: bool = False) -> bytes:
    """The state that the ledger alone gives (or snapshot and ledger)."""
    log = await mesh.bus.open(run_streams("r").ledger.name)
    folder = mesh.folder / ("coordinator/runs/r" if snapshots else "no-snapshots")
    return encode_state((await recover(log, SnapshotStore(folder))).state)


async def live(mesh: MeshParts) -> bytes:
    """The state in the coordinator's memory."""
    assert mesh.node is not None
    driver = await mesh.node.runs.get("r")
    return await driver.read(lambda core, _: encode_state(core.state))


async def test_a_restarted_coordinator_leads_a_run_that_has_no_snapshot_yet(mesh: MeshParts) -> None:
    await mesh.create()
    node = await mesh.restart_coordinator()
    assert list(node.runs.drivers) == ["r"], "before any request has named it"


async def test_a_restarted_coordinator_knows_what_the_old_one_knew(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.train(1)
    await mesh.publish(1)
    leases = await mesh.acquire(3)
    await mesh.generate(leases[:1], step=1)
    batch_before = await mesh.lease(2, wait_s=0.0)
    before = await live(mesh)
    await mesh.stop_coordinator()
    assert await folded(mesh) == before
    assert await folded(mesh, snapshots=True) == before
    await mesh.start_coordinator()
    assert await live(mesh) == before
    await mesh.generate(leases[1:], step=1)  # leases of the old life still count
    await mesh.generate(await mesh.acquire(8), step=1)
    batch = await mesh.lease(2)
    assert not batch_before.lease_id
    digest = (await mesh.commit(2, [batch.lease_id])).digest
    await mesh.checkpoint(2, digest)
    assert (await mesh.state()).samples.trained == 8


@pytest.mark.parametrize("damage", ["flip", "truncate", "foreign", "schema"])
async def test_a_snapshot_that_cannot_be_used_is_skipped(
    mesh: MeshParts, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    await mesh.begin()
    await mesh.train(1)
    folder = mesh.folder / "coordinator/runs/r"

    async def saved() -> bool:
        return bool(list(folder.glob("*.snapshot")))

    await eventually(saved)
    before = await live(mesh)
    await mesh.stop_coordinator()
    for path in folder.glob("*.snapshot"):
        content = bytearray(path.read_bytes())
        if damage == "flip":
            content[-1] ^= 1
            path.write_bytes(content)
        elif damage == "truncate":
            path.write_bytes(content[:20])
        elif damage == "schema":
            SnapshotStore(folder).save(msgspec.msgpack.encode({"position": "of another version"}), int(path.stem))
        else:
            position = int(path.stem)
            path.rename(path.with_stem(f"{position + 10_000:020d}"))
            snapshot = SnapshotStore(folder).load()[0]
            head = msgspec.structs.replace(snapshot.head, hash="ab" * 32)  # of another ledger
            foreign = msgspec.structs.replace(snapshot, head=head)
            SnapshotStore(folder).save(msgspec.msgpack.encode(foreign), position + 10_000)
    await mesh.start_coordinator()
    assert await live(mesh) == before
    assert "snapshot skipped" in caplog.text


async def test_a_ledger_with_a_record_that_cannot_be_read_is_refused_and_others_go_on(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.create(run="s")
    await mesh.stop_coordinator()
    log = await mesh.bus.open(run_streams("r").ledger.name)
    garbage = sealed(RawRecord(payload=b"\xff\xff\xff", msg_id="x"))
    last_seq = (await log.info()).last_seq
    await log.append(garbage.payload, msg_id="x", expected_last_seq=last_seq, headers=garbage.headers)
    await mesh.start_coordinator()
    with pytest.raises(DataLoss, match="RM_r_LEDGER: record 4 cannot be read"):
        await mesh.state()
    assert (await mesh.call(mesh.run.GetRun, run_pb2.GetRunRequest(run="s"))).state.run == "s"


async def test_a_ledger_remains_if_its_run_lacks_another_stream_and_cannot_be_recovered(mesh: MeshParts) -> None:
    """CreateRun makes the missing stream again, and must not take the run for a new one that it may remove."""
    await mesh.begin()
    await mesh.stop_coordinator()
    log = await mesh.bus.open(run_streams("r").ledger.name)
    garbage = sealed(RawRecord(payload=b"\xff\xff\xff", msg_id="x"))
    last_seq = (await log.info()).last_seq
    await log.append(garbage.payload, msg_id="x", expected_last_seq=last_seq, headers=garbage.headers)
    await mesh.bus.delete(run_streams("r").dead.name)
    await mesh.start_coordinator()
    with pytest.raises(DataLoss, match="RM_r_LEDGER: record 4 cannot be read"):
        await mesh.create()
    assert (await log.info()).last_seq == last_seq + 1


async def test_a_run_whose_folder_was_lost_is_found_by_its_name(mesh: MeshParts) -> None:
    await mesh.begin()
    before = await live(mesh)
    await mesh.stop_coordinator()
    (mesh.folder / "coordinator").rename(mesh.folder / "lost")
    await mesh.start_coordinator()
    assert (await mesh.state()).policies[0].published_step == 0
    assert await live(mesh) == before


async def test_a_killed_nats_server_delays_decisions_and_loses_none(mesh: MeshParts) -> None:
    await mesh.begin()
    leases = await mesh.acquire(4)
    reports = [await mesh.finished(lease, step=0) for lease in leases]
    mesh.nats.kill()
    waiting = [asyncio.create_task(mesh.report([report])) for report in reports]
    lease = asyncio.create_task(mesh.lease(1))
    done, _ = await asyncio.wait([*waiting, lease], timeout=0.3)
    assert not done, "nothing may be answered before it is stored"
    await mesh.nats.start()
    assert [await one for one in waiting] == [[""]] * 4
    batch = await lease
    committed = await mesh.commit(1, [batch.lease_id])
    state = await mesh.state()
    assert (committed.ledger_position, committed.ledger_hash) == (state.ledger_position, state.ledger_hash)
    assert await folded(mesh) == await live(mesh)


async def test_a_second_coordinator_fences_the_first(mesh: MeshParts) -> None:
    await mesh.begin()
    assert mesh.node is not None
    first = mesh.node
    second = CoordinatorNode(CONFIG, folder=mesh.folder / "second", access=ACCESS, bus_url=mesh.nats.url)
    async with second, open_channel(second.address, access=ACCESS) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)
        stop = run_pb2.StopRunRequest(run="r", reason="said to the second")
        await mesh.call(stub.StopRun, stop)
        with pytest.raises(MeshError) as refused:
            await mesh.call(mesh.decisions.StopRun, run_pb2.StopRunRequest(run="r", reason="said to the first"))
        assert refused.value.code.name == "UNAVAILABLE", "the caller must look elsewhere, and is not itself fenced"
        with pytest.raises(Fenced, match="another coordinator has taken over RM_r_LEDGER"):
            await asyncio.wait_for(first.failed(), 10)
        state = (await mesh.call(stub.GetRun, run_pb2.GetRunRequest(run="r"))).state
        assert state.ended == "STOPPED: said to the second"


async def test_payloads_go_when_no_live_group_needs_them(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path) as mesh:
        await mesh.begin(episode_lease_s=2.0)
        digest = await mesh.train(1)
        await mesh.publish(1)
        samples = await mesh.bus.open(run_streams("r").samples.name)
        assert (await samples.info()).num_records == 4
        await mesh.checkpoint(1, digest)
        (kept,) = await mesh.acquire(1)
        report = await mesh.finished(kept, step=1)
        assert await mesh.report([report]) == [""]

        async def purged() -> bool:
            return (await samples.info()).first_seq == report.payload.sequence

        await eventually(purged)
        assert (await samples.info()).num_records == 1


async def test_a_payload_reported_after_it_was_purged_is_refused(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path) as mesh:
        await mesh.begin(episode_lease_s=0.2)
        (lease,) = await mesh.acquire(1)
        report = await mesh.finished(lease, step=0)
        samples = await mesh.bus.open(run_streams("r").samples.name)

        async def purged() -> bool:
            return (await samples.info()).num_records == 0

        await eventually(purged)
        assert await mesh.report([report]) == ["UNKNOWN_LEASE"]


async def test_stopping_lets_no_caller_wait(tmp_path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, server=msgspec.structs.replace(CONFIG.server, stop_s=60.0))
    async with coordinator_mesh(tmp_path, config) as mesh:
        await mesh.begin()
        watch = mesh.decisions.WatchRun(run_pb2.WatchRunRequest(run="r"))
        await watch.read()
        request = run_pb2.LeaseBatchRequest(run="r", trainer_epoch=mesh.epoch, update=1, wait_s=30)
        lease = asyncio.create_task(mesh.call(mesh.decisions.LeaseBatch, request))

        async def waits() -> bool:
            return "learner/main" in (await mesh.state()).waiting

        await eventually(waits)
        await asyncio.wait_for(mesh.stop_coordinator(), 20)
        for waiting in (lease, mesh.call(lambda _: watch.read(), None)):
            with pytest.raises(MeshError) as caught:
                await waiting
            assert caught.value.code.name == "UNAVAILABLE"
