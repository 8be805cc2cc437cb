"""A run at the coordinator over real gRPC and a real nats-server: its way from CreateRun to a checkpoint, and every
verb twice."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.ledger import read_ledger
from rollmesh.shared.bus.bus import UnknownRecord
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import (
    FailedPrecondition,
    Fenced,
    InvalidInput,
    RunEnded,
)
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import coordinator_pb2_grpc, events_pb2, run_pb2, types_pb2

from .coordinator_mesh import ACCESS, MeshParts, coordinator_mesh, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
_numbers = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshParts]:
    async with coordinator_mesh(tmp_path_factory.mktemp("mesh")) as parts:
        yield parts


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(shared_mesh: MeshParts) -> MeshParts:
    """The shared mesh, about a run of the test's own."""
    return await shared_mesh.another_run(f"run-{next(_numbers)}")


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
    assert lease.key.run == mesh.name
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
    request = pb.AcquireRolloutsRequest(node_id=mesh.worker, num_max=1, wait_s=0.05)
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


async def test_a_watcher_gets_the_current_state_then_changes_and_a_stop_command(mesh: MeshParts) -> None:
    await mesh.begin()
    watch = mesh.run.WatchRun(run_pb2.WatchRunRequest(run=mesh.name))
    first = await watch.read()
    assert first.state.policies[0].published_step == 0
    assert first.command == run_pb2.TRAINER_COMMAND_UNSPECIFIED
    await mesh.call(mesh.run.StopRun, run_pb2.StopRunRequest(run=mesh.name, reason="enough"))
    async with asyncio.timeout(10):
        while not (news := await watch.read()).state.ended:
            assert news.state.ledger_position > first.state.ledger_position
    assert news.state.ended == "STOPPED: enough"
    assert news.command == run_pb2.TRAINER_COMMAND_STOP
    watch.cancel()


async def test_a_worker_that_hangs_up_leaves_no_lease_behind(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.acquire(100)
    request = pb.AcquireRolloutsRequest(node_id=mesh.worker, num_max=1, wait_s=30)
    call = mesh.coordinator.AcquireRollouts(request)

    async def waits() -> bool:
        return f"worker/{mesh.worker}" in (await mesh.state()).waiting

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
    dead = await mesh.bus.open(run_streams(mesh.name).dead.name)

    async def dead_lettered() -> bool:
        return await dead.last() is not None

    await eventually(dead_lettered)
    record = await dead.last()
    assert record is not None
    letter = events_pb2.DeadLetter.FromString(record.payload)
    assert letter.subject == lease.key.episode
    assert letter.cause == "sandbox: no jail"
    assert letter.task.task_id == lease.key.task
    (listed,) = await dead_letters(mesh)
    assert (listed.letter.dead_id, listed.replayed) == (1, False)
    await replay_and_train(mesh, lease)


async def dead_letters(mesh: MeshParts) -> list[run_pb2.ListedLetter]:
    return list((await mesh.call(mesh.run.ListDead, run_pb2.ListDeadRequest(run=mesh.name))).letters)


async def replay_and_train(mesh: MeshParts, lease: pb.EpisodeLease) -> None:
    """The task of a dead letter comes back as a new group, ends trained, and the ledger tells of it."""
    request = run_pb2.ReplayDeadRequest(run=mesh.name)
    assert list((await mesh.call(mesh.run.ReplayDead, request)).dead_ids) == [1]
    assert list((await mesh.call(mesh.run.ReplayDead, request)).dead_ids) == []
    (again,) = await mesh.acquire(1)
    assert again.key.task == lease.key.task
    assert again.key.group != lease.key.group
    await mesh.generate([again], step=0)
    batch = await mesh.lease(1)
    digest = (await mesh.commit(1, [batch.lease_id])).digest
    await mesh.checkpoint(1, digest)
    assert [letter.replayed for letter in await dead_letters(mesh)] == [True]
    report = await audit_run(mesh.bus, mesh.name, sample=batch.samples[0].meta.sample_id)
    assert report.holds, report.to_text()
    assert any("dead letter 1" in line.what for line in report.history)


async def test_what_cannot_be_replayed_is_refused_with_its_reason(mesh: MeshParts) -> None:
    await mesh.begin()
    with pytest.raises(UnknownRecord, match="no dead letter 3"):
        await mesh.call(mesh.run.ReplayDead, run_pb2.ReplayDeadRequest(run=mesh.name, dead_ids=[3]))
    dead = await mesh.bus.open(run_streams(mesh.name).dead.name)
    await dead.append(b"\xff garbage", msg_id="x")
    (listed,) = await dead_letters(mesh)
    assert listed.letter.cause == "9 bytes that are not a dead letter"
    with pytest.raises(FailedPrecondition, match="only tasks of training") as refused:
        await mesh.call(mesh.run.ReplayDead, run_pb2.ReplayDeadRequest(run=mesh.name, dead_ids=[1]))
    assert refused.value.reason == "NOT_REPLAYABLE"
    await mesh.call(mesh.run.StopRun, run_pb2.StopRunRequest(run=mesh.name))
    with pytest.raises(RunEnded):
        await mesh.call(mesh.run.ReplayDead, run_pb2.ReplayDeadRequest(run=mesh.name))


async def test_a_payload_that_cannot_be_read_costs_its_samples_and_is_recorded_once(mesh: MeshParts) -> None:
    await mesh.begin()
    leases = await mesh.acquire(4)
    reports = [await mesh.finished(lease, step=0) for lease in leases]
    samples = await mesh.bus.open(run_streams(mesh.name).samples.name)
    garbage = await samples.append(b"\xff garbage", msg_id="garbage")
    reports[0].payload.sequence = garbage
    await mesh.report(reports)
    batch = await mesh.lease(1)
    for _ in range(2):
        fetched = await mesh.fetch(batch.lease_id)
        (broken,) = [message for message in fetched if message.HasField("failure")]
        assert list(broken.sample_ids) == [reports[0].samples[0].sample_id]
        assert not broken.HasField("episode")
        assert len(fetched) == 4
    (listed,) = await dead_letters(mesh)
    assert listed.letter.kind == events_pb2.DEAD_KIND_PAYLOAD
    assert listed.letter.payload_sequence == garbage
    await mesh.commit(1, [batch.lease_id], dropped=list(broken.sample_ids))


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
    again = await mesh.lease(1)
    assert 0 < again.lease_s < batch.lease_s
    again.lease_s = batch.lease_s
    assert again == batch
    committed = await mesh.commit(1, [batch.lease_id])
    assert (await mesh.commit(1, [batch.lease_id])).digest == committed.digest
    await mesh.checkpoint(1, committed.digest)
    await mesh.checkpoint(1, committed.digest)
    for _ in range(2):
        await mesh.call(mesh.run.StopRun, run_pb2.StopRunRequest(run=mesh.name, reason="x"))
    state = await mesh.state()
    assert (state.samples.trained, state.policies[0].applied_step) == (4, 1)


async def test_measurements_on_groups_are_stored_with_the_first_commit_of_an_update(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.generate(await mesh.acquire(), step=0)
    batch = await mesh.lease(1)
    names = [group.group for group in batch.groups]
    given = [
        events_pb2.TrainedGroup(group=name, mean_abs_advantage=0.1 + n, policy_loss=-0.3, num_tokens=5 + n)
        for n, name in enumerate(names)
    ]
    with pytest.raises(InvalidInput, match="`groups` must name only groups of the leases of update 1, got ") as caught:
        await mesh.commit(1, [batch.lease_id], groups=[*given, events_pb2.TrainedGroup(group="g999", num_tokens=1)])
    assert [violation.field for violation in caught.value.violations] == ["groups"]
    committed = await mesh.commit(1, [batch.lease_id], groups=given)
    assert (await mesh.commit(1, [batch.lease_id], groups=given[:1])).digest == committed.digest
    ledger = await mesh.bus.open(run_streams(mesh.name).ledger.name)
    facts = [fact async for record in read_ledger(ledger) for fact in record.facts]
    (commit,) = [fact for fact in facts if isinstance(fact, f.UpdateCommitted)]
    assert [(g.group, g.mean_abs_advantage, g.policy_loss, g.num_tokens) for g in commit.groups] == [
        (name, 0.1 + n, -0.3, 5 + n) for n, name in enumerate(names)
    ]


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


async def test_renewing_extends_held_leases_and_names_ended_ones(mesh: MeshParts) -> None:
    await mesh.begin(episode_lease_s=7.0, batch_lease_s=9.0)
    held, done = await mesh.acquire(2)
    await mesh.generate([done], step=0)
    names = [held.lease_id, done.lease_id, "other/g0.0#1", "nonsense"]
    renewed = await mesh.call(mesh.coordinator.RenewLeases, pb.RenewLeasesRequest(node_id=mesh.worker, lease_ids=names))
    assert renewed.lease_s == 7.0
    assert set(renewed.gone) == {done.lease_id, "other/g0.0#1", "/nonsense"}


async def test_two_runs_share_a_worker_and_keep_their_leases_apart(tmp_path: Path) -> None:
    async with coordinator_mesh(tmp_path) as mesh:
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
        metadata = (("authorization", f"Bearer {ACCESS.token}"),)
        assert (await stub.GetFleet(pb.GetFleetRequest(), metadata=metadata)).nodes
