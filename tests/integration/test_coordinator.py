"""The coordinator over real gRPC and a real nats-server: a run's way, idempotency, loss of parts, recovery, fencing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from rollmesh.services.coordinator.node import CoordinatorNode
from rollmesh.services.coordinator.recovery import recover
from rollmesh.services.coordinator.snapshots import SnapshotStore, encode_state
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import (
    DataLoss,
    Fenced,
    InvalidInput,
    MeshError,
    Unimplemented,
    UnknownNode,
)
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, run_pb2, run_pb2_grpc, types_pb2

from .coordinator_mesh import CONFIG, DEPOT, ROLLOUT, TOKEN, WORKER, MeshParts, coordinator_mesh, eventually, stream_of

pb = coordinator_pb2


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
    return await driver.look(lambda core, _: encode_state(core.state))


# A run's way ----------------------------------------------------------------------------------------------------------


async def test_two_updates_from_task_to_checkpoint_conserve_every_sample(mesh: MeshParts) -> None:
    await mesh.begin()
    first = await mesh.train(1)
    await mesh.publish(1)
    second = await mesh.train(2)
    await mesh.checkpoint(2, second)
    state = await mesh.state()
    assert first != second
    assert state.policies[0].digest == second
    assert state.samples.trained == 8
    assert state.samples.reserved == state.samples.trained + state.samples.live
    assert dict(state.policies[0].trained_by_staleness) == {0: 8}


async def test_a_lease_carries_task_target_and_a_seed_that_a_retry_keeps(mesh: MeshParts) -> None:
    await mesh.begin()
    (lease,) = await mesh.acquire(1)
    assert lease.key.run == "r"
    assert lease.task.messages
    assert lease.policy == "main"
    assert lease.step_min == 0
    assert lease.purpose == types_pb2.PURPOSE_TRAIN
    failed = pb.EpisodeReport(lease_id=lease.lease_id, key=lease.key, outcome=pb.EPISODE_OUTCOME_INFRA_FAILURE)
    assert await mesh.report([failed]) == [""]
    (again,) = await mesh.acquire(1)
    assert again.key.episode == lease.key.episode
    assert again.key.attempt == lease.key.attempt + 1
    assert again.seed == lease.seed


async def test_admission_holds_workers_until_the_learner_has_caught_up(mesh: MeshParts) -> None:
    await mesh.begin()
    # eta = 1 and step 0 published: updates 1 and 2 may be sampled, of two groups of two each.
    leases = await mesh.acquire(100)
    leases += await mesh.acquire(100, wait_s=0.05)
    assert len(leases) == 8
    request = pb.AcquireRolloutsRequest(node_id=WORKER, num_max=1, wait_s=0.05)
    empty = await mesh.call(mesh.coordinator.AcquireRollouts, request)
    assert "admission" in empty.waiting_for


async def test_evaluation_is_measured_and_never_leased_to_the_learner(mesh: MeshParts) -> None:
    await mesh.begin(eval_every=1, eval_tasks=2, eval_split="test")

    async def drawn() -> bool:
        return bool((await mesh.state()).eval_samples.reserved)

    await eventually(drawn)
    leases = await mesh.acquire(2)
    assert [lease.purpose for lease in leases] == [types_pb2.PURPOSE_EVAL] * 2
    await mesh.generate(leases, step=0)
    state = await mesh.state()
    assert state.evals[0].complete
    assert state.evals[0].num_samples == 2
    assert state.evals[0].mean_rewards["correct"] == 1.0  # each is the first episode of its group
    assert state.eval_samples.exported == 2
    assert state.samples.live == state.samples.reserved


async def test_a_watcher_sees_the_present_then_changes_and_is_told_to_stop(mesh: MeshParts) -> None:
    await mesh.begin()
    watch = mesh.run.WatchRun(run_pb2.WatchRunRequest(run="r"))
    first = await watch.read()
    assert first.state.policies[0].published_step == 0
    assert first.command == run_pb2.TRAINER_COMMAND_UNSPECIFIED
    await mesh.call(mesh.run.StopRun, run_pb2.StopRunRequest(run="r", reason="enough"))
    async with asyncio.timeout(10):
        while not (news := await watch.read()).state.ended:
            assert news.state.ledger_position > first.state.ledger_position
    assert news.state.ended == "STOPPED: enough"
    assert news.command == run_pb2.TRAINER_COMMAND_STOP
    watch.cancel()


async def test_a_worker_that_hangs_up_leaves_no_lease_behind(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.acquire(100)
    request = pb.AcquireRolloutsRequest(node_id=WORKER, num_max=1, wait_s=30)
    call = mesh.coordinator.AcquireRollouts(request)

    async def waits() -> bool:
        return f"worker/{WORKER}" in (await mesh.state()).waiting

    await eventually(waits)
    call.cancel()

    async def forgotten() -> bool:
        return not await waits()

    await eventually(forgotten)


async def test_a_task_that_breaks_everything_is_quarantined_with_its_cause(mesh: MeshParts) -> None:
    await mesh.begin(group_size=1, batch_groups=1, tries_max=2)
    for _ in range(2):
        (lease,) = await mesh.acquire(1)
        failure = types_pb2.Failure(reason="SANDBOX_FAILED", message="sandbox: no jail")
        outcome = pb.EPISODE_OUTCOME_INFRA_FAILURE
        await mesh.report([pb.EpisodeReport(lease_id=lease.lease_id, key=lease.key, outcome=outcome, failure=failure)])
    assert dict((await mesh.state()).samples.reasons) == {"failed/TRIES_EXHAUSTED": 1}
    dead = await mesh.bus.open(run_streams("r").dead.name)

    async def buried() -> bool:
        return await dead.last() is not None

    await eventually(buried)
    record = await dead.last()
    assert record is not None
    letter = msgspec.json.decode(record.payload)
    assert letter["subject"] == lease.key.episode
    assert letter["cause"] == "sandbox: no jail"
    assert letter["task"]["task_id"] == lease.key.task


# Idempotency ----------------------------------------------------------------------------------------------------------


async def test_every_verb_may_be_repeated(mesh: MeshParts) -> None:
    assert (await mesh.create()).created
    assert not (await mesh.create()).created
    await mesh.attach()
    await mesh.publish(0)
    await mesh.publish(0)
    leases = await mesh.acquire()
    reports = [await mesh.finished(lease, step=0) for lease in leases]
    assert await mesh.report(reports) == [""] * 4
    assert await mesh.report(reports) == [""] * 4
    batch = await mesh.lease(1)
    assert await mesh.lease(1) == batch
    committed = await mesh.commit(1, [batch.lease_id])
    assert (await mesh.commit(1, [batch.lease_id])).digest == committed.digest
    await mesh.checkpoint(1, committed.digest)
    await mesh.checkpoint(1, committed.digest)
    for _ in range(2):
        await mesh.call(mesh.run.StopRun, run_pb2.StopRunRequest(run="r", reason="x"))
    state = await mesh.state()
    assert (state.samples.trained, state.policies[0].applied_step) == (4, 1)


async def test_attaching_again_makes_a_new_epoch_and_loses_nothing(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.generate(await mesh.acquire(), step=0)
    batch = await mesh.lease(1)
    old = mesh.epoch
    again = await mesh.attach()
    assert again.trainer_epoch == old + 1
    assert again.resolution == run_pb2.ATTACH_RESOLUTION_CONTINUED
    assert again.weights_address
    assert again.spec.max_staleness == 1
    with pytest.raises(Fenced):
        await mesh.commit(1, [batch.lease_id], trainer_epoch=old)
    retaken = await mesh.lease(1)
    assert {s.meta.sample_id for s in retaken.samples} == {s.meta.sample_id for s in batch.samples}


async def test_renewing_extends_what_is_held_and_names_what_is_gone(mesh: MeshParts) -> None:
    await mesh.begin(episode_lease_s=7.0, batch_lease_s=9.0)
    held, done = await mesh.acquire(2)
    await mesh.generate([done], step=0)
    names = [held.lease_id, done.lease_id, "other/g0.0#1", "nonsense"]
    renewed = await mesh.call(mesh.coordinator.RenewLeases, pb.RenewLeasesRequest(node_id=WORKER, lease_ids=names))
    assert renewed.lease_s == 7.0
    assert set(renewed.gone) == {done.lease_id, "other/g0.0#1", "/nonsense"}


# Nodes ----------------------------------------------------------------------------------------------------------------


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
    with pytest.raises(MeshError) as caught:
        await mesh.call(ask, pb.AcquireRolloutsRequest(node_id=WORKER, num_max=1))
    assert (caught.value.code.name, caught.value.reason) == ("FAILED_PRECONDITION", "DRAINING")


async def test_a_silent_workers_episodes_go_to_others(tmp_path: Path) -> None:
    fleet = msgspec.structs.replace(CONFIG.fleet, suspect_after_s=0.4, dead_after_s=0.6)
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
        return bool(await driver.look(lambda core, _: core.state.the_clock.quarantined))

    await eventually(quarantined)
    fleet = await mesh.call(mesh.coordinator.GetFleet, pb.GetFleetRequest(kind=pb.NODE_KIND_INFERENCE))
    assert fleet.nodes[0].state == pb.NODE_STATE_QUARANTINED
    assert fleet.nodes[0].cause == "off by 3 nats"
    call.cancel()


# Loss and recovery ----------------------------------------------------------------------------------------------------


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
    await mesh.wait_ready(ROLLOUT, DEPOT, pb.NODE_KIND_REWARD, pb.NODE_KIND_DATA)
    await mesh.generate(leases[1:], step=1)  # leases of the old life still count
    await mesh.generate(await mesh.acquire(8), step=1)
    batch = await mesh.lease(2)
    assert not batch_before.lease_id
    digest = (await mesh.commit(2, [batch.lease_id])).digest
    await mesh.checkpoint(2, digest)
    assert (await mesh.state()).samples.trained == 8


@pytest.mark.parametrize("damage", ["flip", "truncate", "foreign", "schema"])
async def test_a_snapshot_that_cannot_be_used_is_passed_by(
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
            foreign = msgspec.structs.replace(snapshot, record_id="d-of-another-ledger")
            SnapshotStore(folder).save(msgspec.msgpack.encode(foreign), position + 10_000)
    await mesh.start_coordinator()
    assert await live(mesh) == before
    assert "passed by" in caplog.text


async def test_a_ledger_with_a_record_that_cannot_be_read_is_refused_and_others_go_on(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.create(run="s")
    await mesh.stop_coordinator()
    log = await mesh.bus.open(run_streams("r").ledger.name)
    await log.append(b"\xff\xff\xff", msg_id="x", expected_last_seq=(await log.info()).last_seq)
    await mesh.start_coordinator()
    with pytest.raises(DataLoss, match="RM_r_LEDGER: record 4 cannot be read"):
        await mesh.state()
    assert (await mesh.call(mesh.run.GetRun, run_pb2.GetRunRequest(run="s"))).state.run == "s"


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
    assert committed.ledger_position == (await mesh.state()).ledger_position
    assert await folded(mesh) == await live(mesh)


async def test_a_second_coordinator_fences_the_first(mesh: MeshParts) -> None:
    await mesh.begin()
    assert mesh.node is not None
    first = mesh.node
    second = CoordinatorNode(CONFIG, folder=mesh.folder / "second", token=TOKEN, bus_url=mesh.nats.url)
    async with second, open_channel(second.address, token=TOKEN) as channel:
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
        await mesh.begin(episode_lease_s=0.3)
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


async def test_two_runs_share_a_worker_and_keep_their_leases_apart(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.create(run="s")
    attach = run_pb2.AttachTrainerRequest(run="s")
    epoch = (await mesh.call(mesh.run.AttachTrainer, attach)).trainer_epoch
    digest = await mesh.upload(b"other")
    version = types_pb2.PolicyVersion(weights_digest=digest)
    publish = run_pb2.PublishVersionRequest(run="s", trainer_epoch=epoch, version=version)
    await mesh.call(mesh.run.PublishVersion, publish)
    leases: list[pb.EpisodeLease] = []

    async def both() -> bool:
        leases.extend(await mesh.acquire(1))
        return {lease.key.run for lease in leases} == {"r", "s"}

    await eventually(both)
    assert len({lease.lease_id for lease in leases}) == len(leases)
    assert set(await mesh.generate(leases, step=0)) == {""}


async def test_a_stub_of_another_language_needs_only_the_contract(mesh: MeshParts) -> None:
    """Unset optional fields mean their defaults."""
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        assert (await stub.GetFleet(pb.GetFleetRequest(), metadata=metadata)).nodes
    with pytest.raises(Unimplemented):
        await mesh.call(mesh.coordinator.ExtendGroup, pb.ExtendGroupRequest(run="r"))
