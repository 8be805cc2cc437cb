"""Every error that run.proto promises: its code and reason, through the gateway, as a trainer meets it."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

import rollmesh.v1.run_pb2
from rollmesh.services.coordinator.core.facts import StepSpan
from rollmesh.services.coordinator.core.fleet import Fleet
from rollmesh.shared.errors import Code, MeshError, NotReady, RunEnded
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2, events_pb2, types_pb2, weights_pb2
from rollmesh.v1 import run_pb2 as pb

from .coordinator_mesh import MIB, MeshParts, coordinator_mesh, eventually, spec

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROTO = Path(rollmesh.v1.run_pb2.__file__).with_name("run.proto")
CODES = "|".join(code.name for code in Code)
COMPLETED = coordinator_pb2.EPISODE_OUTCOME_COMPLETED
Scenario = Callable[[MeshParts], Awaitable[Any]]
SCENARIOS: dict[tuple[str, str, str], Scenario] = {}
"""What brings about (verb, code, reason)."""


def brings(verb: str, code: str, reason: str) -> Callable[[Scenario], Scenario]:
    def note(scenario: Scenario) -> Scenario:
        SCENARIOS[verb, code, reason] = scenario
        return scenario

    return note


def promised() -> set[tuple[str, str, str]]:
    """(verb, code, reason or "") from the comments above each rpc."""
    found = set()
    for comment, verb in re.findall(r"((?:  //[^\n]*\n)+)  rpc (\w+)\(", PROTO.read_text()):
        errors = comment.partition("Errors:")[2]
        for code, reason in re.findall(rf"\b({CODES})\b(?: ([A-Z][A-Z_]+))?", errors):
            found.add((verb, code, reason))
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[MeshParts]:
    async with coordinator_mesh(tmp_path_factory.mktemp("errors")) as parts:
        yield parts


# CreateRun, AttachTrainer ---------------------------------------------------------------------------------------------


@brings("CreateRun", "ALREADY_EXISTS", "RUN_EXISTS")
async def another_spec(mesh: MeshParts) -> None:
    await mesh.create()
    await mesh.create(max_staleness=3)


@brings("CreateRun", "INVALID_ARGUMENT", "INVALID_SPEC")
async def an_impossible_spec(mesh: MeshParts) -> None:
    await mesh.create(publish_every=5)


@brings("AttachTrainer", "NOT_FOUND", "UNKNOWN_RUN")
async def a_run_never_made(mesh: MeshParts) -> None:
    await mesh.attach()


@brings("AttachTrainer", "FAILED_PRECONDITION", "DIGEST_MISMATCH")
async def a_checkpoint_of_another_history(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.train(1)
    await mesh.attach(1, "0" * 64)


@brings("AttachTrainer", "OUT_OF_RANGE", "UNKNOWN_UPDATE")
async def a_checkpoint_ahead_of_the_ledger(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.attach(7, "0" * 64)


@brings("AttachTrainer", "INVALID_ARGUMENT", "")
async def a_checkpoint_before_the_first_update(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.attach(-1)


# LeaseBatch -----------------------------------------------------------------------------------------------------------


@brings("LeaseBatch", "ABORTED", "FENCED")
async def leasing_in_an_old_epoch(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.attach()
    await mesh.lease(1, trainer_epoch=mesh.epoch - 1)


async def expired(mesh: MeshParts) -> str:
    """The id of a batch lease that has run out."""
    await mesh.begin(batch_lease_s=0.1)
    await mesh.generate(await mesh.acquire(), step=0)
    batch = await mesh.lease(1)

    async def in_doubt() -> bool:
        return (await mesh.state()).policies[0].groups["in_doubt"] == 2

    await eventually(in_doubt)
    return batch.lease_id


@brings("LeaseBatch", "FAILED_PRECONDITION", "LEASE_EXPIRED")
async def leasing_again_after_expiry(mesh: MeshParts) -> None:
    await expired(mesh)
    await mesh.lease(1)


@brings("LeaseBatch", "FAILED_PRECONDITION", "WRONG_UPDATE")
async def leasing_ahead(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.lease(2)


@brings("LeaseBatch", "FAILED_PRECONDITION", "NOT_PUBLISHED")
async def leasing_after_a_roll_back(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.train(1)
    await mesh.attach(0)
    await mesh.lease(1)


async def leased(mesh: MeshParts) -> str:
    """The lease of update 1, which is out."""
    await mesh.begin()
    await mesh.generate(await mesh.acquire(), step=0)
    return (await mesh.lease(1)).lease_id


@brings("LeaseBatch", "INVALID_ARGUMENT", "")
async def leasing_more_than_can_be_admitted(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.lease(1, geometry=pb.BatchGeometry(unit=pb.BatchGeometry.UNIT_GROUPS, amount=1000))


@brings("LeaseBatch", "OUT_OF_RANGE", "RUN_ENDED")
async def leasing_after_the_end(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.call(mesh.run.StopRun, pb.StopRunRequest(run=mesh.name))
    await mesh.lease(1)


# FetchSamples, RenewBatch, ReleaseBatch -------------------------------------------------------------------------------


@brings("FetchSamples", "NOT_FOUND", "UNKNOWN_LEASE")
async def fetching_what_was_never_leased(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.fetch("nonsense")


@brings("FetchSamples", "ABORTED", "FENCED")
async def fetching_in_an_old_epoch(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.attach()
    mesh.epoch -= 1
    await mesh.fetch("any")


@brings("FetchSamples", "FAILED_PRECONDITION", "LEASE_EXPIRED")
async def fetching_too_late(mesh: MeshParts) -> None:
    await mesh.fetch(await expired(mesh))


@brings("FetchSamples", "DATA_LOSS", "PAYLOAD_LOST")
async def fetching_what_is_gone(mesh: MeshParts) -> None:
    await mesh.begin()
    leases = await mesh.acquire()
    await mesh.generate(leases, step=0)
    batch = await mesh.lease(1)
    samples = await mesh.bus.open(f"RM_{mesh.name}_SAMPLES")
    await samples.purge_below((await samples.info()).last_seq)
    await mesh.fetch(batch.lease_id)


@brings("FetchSamples", "INVALID_ARGUMENT", "")
async def fetching_a_shard_that_is_not(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.fetch("any", index=2, num=2)


async def renew(mesh: MeshParts, lease_id: str, epoch: int) -> None:
    request = pb.RenewBatchRequest(run=mesh.name, trainer_epoch=epoch, lease_id=lease_id)
    await mesh.call(mesh.run.RenewBatch, request)


@brings("RenewBatch", "NOT_FOUND", "UNKNOWN_LEASE")
async def renewing_what_was_never_leased(mesh: MeshParts) -> None:
    await mesh.begin()
    await renew(mesh, "nonsense", mesh.epoch)


@brings("PrefetchSamples", "NOT_FOUND", "UNKNOWN_RUN")
async def prefetching_from_no_run(mesh: MeshParts) -> None:
    await mesh.prefetch(1, trainer_epoch=1)


@brings("PrefetchSamples", "INVALID_ARGUMENT", "")
async def prefetching_nothing(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.prefetch(1, geometry=pb.BatchGeometry(amount=0))


@brings("PrefetchSamples", "ABORTED", "FENCED")
async def prefetching_in_an_old_epoch(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.attach()
    await mesh.prefetch(1, trainer_epoch=mesh.epoch - 1)


@brings("PrefetchSamples", "FAILED_PRECONDITION", "NO_LEARNER")
async def prefetching_from_an_export(mesh: MeshParts) -> None:
    await mesh.begin(export_groups=2)
    await mesh.prefetch(1)


@brings("PrefetchSamples", "OUT_OF_RANGE", "RUN_ENDED")
async def prefetching_after_the_end(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.call(mesh.run.StopRun, pb.StopRunRequest(run=mesh.name))
    await mesh.prefetch(1)


@brings("RenewBatch", "ABORTED", "FENCED")
async def renewing_in_an_old_epoch(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.attach()
    await renew(mesh, "any", mesh.epoch - 1)


@brings("RenewBatch", "FAILED_PRECONDITION", "LEASE_EXPIRED")
async def renewing_too_late(mesh: MeshParts) -> None:
    await renew(mesh, await expired(mesh), mesh.epoch)


async def release(mesh: MeshParts, lease_id: str, epoch: int) -> None:
    request = pb.ReleaseBatchRequest(run=mesh.name, trainer_epoch=epoch, lease_id=lease_id)
    await mesh.call(mesh.run.ReleaseBatch, request)


@brings("ReleaseBatch", "ABORTED", "FENCED")
async def releasing_in_an_old_epoch(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.attach()
    await release(mesh, "any", mesh.epoch - 1)


@brings("ReleaseBatch", "NOT_FOUND", "UNKNOWN_LEASE")
async def releasing_what_was_committed(mesh: MeshParts) -> None:
    lease_id = await leased(mesh)
    await mesh.commit(1, [lease_id])
    await release(mesh, lease_id, mesh.epoch)


@brings("ReleaseBatch", "FAILED_PRECONDITION", "LEASE_EXPIRED")
async def releasing_too_late(mesh: MeshParts) -> None:
    await release(mesh, await expired(mesh), mesh.epoch)


# CommitUpdate ---------------------------------------------------------------------------------------------------------


@brings("CommitUpdate", "ABORTED", "FENCED")
async def committing_in_an_old_epoch(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.generate(await mesh.acquire(), step=0)
    batch = await mesh.lease(1)
    await mesh.attach()
    await mesh.commit(1, [batch.lease_id], trainer_epoch=mesh.epoch - 1)


@brings("CommitUpdate", "FAILED_PRECONDITION", "LEASE_EXPIRED")
async def committing_too_late(mesh: MeshParts) -> None:
    await mesh.commit(1, [await expired(mesh)])


@brings("CommitUpdate", "FAILED_PRECONDITION", "BEYOND_BOUND")
async def committing_what_is_too_old(mesh: MeshParts) -> None:
    """Beyond the contract: only a bug or a changed bound brings an inadmissible sample into a lease, so one is put
    there."""
    await mesh.begin()
    await mesh.generate(await mesh.acquire(), step=0)
    batch = await mesh.lease(1)
    assert mesh.node is not None

    def age(core: Any, _: object) -> None:
        for group in core.state.groups.values():
            for sample in group.samples.values():
                sample.meta = msgspec.structs.replace(sample.meta, steps=(StepSpan(step=-5, num_tokens=1),))

    await (await mesh.node.runs.get(mesh.name)).read(age)
    await mesh.commit(1, [batch.lease_id])


@brings("CommitUpdate", "ALREADY_EXISTS", "COMMIT_CONFLICT")
async def committing_otherwise_than_before(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.generate(await mesh.acquire(), step=0)
    batch = await mesh.lease(1)
    await mesh.commit(1, [batch.lease_id])
    await mesh.commit(1, [batch.lease_id], outcome=pb.UPDATE_OUTCOME_SKIPPED)


@brings("CommitUpdate", "NOT_FOUND", "UNKNOWN_LEASE")
async def committing_what_was_released(mesh: MeshParts) -> None:
    lease_id = await leased(mesh)
    await release(mesh, lease_id, mesh.epoch)
    await mesh.commit(1, [lease_id])


@brings("CommitUpdate", "INVALID_ARGUMENT", "UNKNOWN_SAMPLE")
async def committing_a_sample_of_another_batch(mesh: MeshParts) -> None:
    lease_id = await leased(mesh)
    dropped = pb.DisposedSample(sample_id="s", disposition=pb.SAMPLE_DISPOSITION_DROPPED, reason="TOO_LONG")
    await mesh.commit(1, [lease_id], samples=[dropped])


@brings("CommitUpdate", "INVALID_ARGUMENT", "UNKNOWN_GROUP")
async def committing_measurements_on_a_group_of_another_batch(mesh: MeshParts) -> None:
    lease_id = await leased(mesh)
    await mesh.commit(1, [lease_id], groups=[events_pb2.TrainedGroup(group="g", num_tokens=1)])


@brings("CommitUpdate", "FAILED_PRECONDITION", "LEASE_OUT")
async def committing_past_the_lease(mesh: MeshParts) -> None:
    await leased(mesh)
    await mesh.commit(1, [])


@brings("CommitUpdate", "FAILED_PRECONDITION", "WRONG_UPDATE")
async def committing_ahead(mesh: MeshParts) -> None:
    await mesh.commit(2, [await leased(mesh)])


@brings("CommitUpdate", "OUT_OF_RANGE", "RUN_ENDED")
async def committing_an_empty_update_after_the_end(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.call(mesh.run.StopRun, pb.StopRunRequest(run=mesh.name))
    await mesh.commit(1, [])


@brings("CommitUpdate", "INVALID_ARGUMENT", "")
async def disposing_of_a_stranger(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.generate(await mesh.acquire(), step=0)
    batch = await mesh.lease(1)
    await mesh.commit(1, [batch.lease_id], dropped=["stranger"])


# ReportCheckpoint, PublishVersion, the rest ---------------------------------------------------------------------------


@brings("ReportCheckpoint", "ABORTED", "FENCED")
async def reporting_in_an_old_epoch(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.attach()
    await mesh.checkpoint(0, "", trainer_epoch=mesh.epoch - 1)


@brings("ReportCheckpoint", "FAILED_PRECONDITION", "DIGEST_MISMATCH")
async def reporting_another_history(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.train(1)
    await mesh.checkpoint(1, "0" * 64)


@brings("ReportCheckpoint", "OUT_OF_RANGE", "UNKNOWN_UPDATE")
async def reporting_what_was_never_committed(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.checkpoint(3, "0" * 64)


@brings("PublishVersion", "ABORTED", "FENCED")
async def publishing_in_an_old_epoch(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.attach()
    mesh.epoch -= 1
    await mesh.publish(0)


@brings("PublishVersion", "FAILED_PRECONDITION", "WRONG_VERSION")
async def publishing_a_step_not_made(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.publish(4)


@brings("PublishVersion", "ALREADY_EXISTS", "VERSION_CONFLICT")
async def publishing_other_weights_for_a_step(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.publish(0, content=b"others")


@brings("PublishVersion", "FAILED_PRECONDITION", "NOT_UPLOADED")
async def publishing_what_the_depot_lacks(mesh: MeshParts) -> None:
    await mesh.create()
    await mesh.attach()
    version = types_pb2.PolicyVersion(weights_digest="0" * 64)
    request = pb.PublishVersionRequest(run=mesh.name, trainer_epoch=mesh.epoch, version=version)
    await mesh.call(mesh.run.PublishVersion, request)


@brings("WatchRun", "NOT_FOUND", "UNKNOWN_RUN")
async def watching_nothing(mesh: MeshParts) -> None:
    with typed_errors():
        await mesh.run.WatchRun(pb.WatchRunRequest(run="nothing")).read()


@brings("GetRun", "NOT_FOUND", "UNKNOWN_RUN")
async def asking_for_nothing(mesh: MeshParts) -> None:
    await mesh.call(mesh.run.GetRun, pb.GetRunRequest(run="not/a name"))


@brings("StopRun", "NOT_FOUND", "UNKNOWN_RUN")
async def stopping_nothing(mesh: MeshParts) -> None:
    await mesh.call(mesh.run.StopRun, pb.StopRunRequest(run="nothing"))


@brings("DeleteRun", "NOT_FOUND", "UNKNOWN_RUN")
async def deleting_nothing(mesh: MeshParts) -> None:
    await mesh.call(mesh.run.DeleteRun, pb.DeleteRunRequest(run="nothing"))


@brings("DeleteRun", "FAILED_PRECONDITION", "RUN_LIVE")
async def deleting_what_is_live(mesh: MeshParts) -> None:
    await mesh.create()
    await mesh.call(mesh.run.DeleteRun, pb.DeleteRunRequest(run=mesh.name))


# ChangeRun, exports, dead letters -------------------------------------------------------------------------------------


async def change(mesh: MeshParts, **changes: Any) -> None:
    change_id = changes.pop("change_id", "change")
    request = pb.ChangeRunRequest(spec=spec(**({"run": mesh.name} | changes)), change_id=change_id)
    await mesh.call(mesh.run.ChangeRun, request)


@brings("ChangeRun", "NOT_FOUND", "UNKNOWN_RUN")
async def changing_nothing(mesh: MeshParts) -> None:
    await change(mesh, run="nothing")


@brings("ChangeRun", "INVALID_ARGUMENT", "")
async def changing_without_an_id(mesh: MeshParts) -> None:
    await mesh.create()
    await change(mesh, change_id="", max_staleness=0)


@brings("ChangeRun", "INVALID_ARGUMENT", "INVALID_SPEC")
async def changing_to_the_impossible(mesh: MeshParts) -> None:
    await mesh.create()
    await change(mesh, publish_every=5)


@brings("ChangeRun", "FAILED_PRECONDITION", "CHANGE_REFUSED")
async def changing_what_is_fixed(mesh: MeshParts) -> None:
    await mesh.create()
    await change(mesh, group_size=7)


@brings("LeaseBatch", "FAILED_PRECONDITION", "NO_LEARNER")
async def leasing_from_an_export(mesh: MeshParts) -> None:
    await mesh.begin(export_groups=2)
    await mesh.lease(1)


@brings("CommitUpdate", "FAILED_PRECONDITION", "NO_LEARNER")
async def committing_to_an_export(mesh: MeshParts) -> None:
    await mesh.begin(export_groups=2)
    await mesh.commit(1, ["any"])


@brings("StreamSamples", "NOT_FOUND", "UNKNOWN_RUN")
async def streaming_nothing(mesh: MeshParts) -> None:
    await stream(mesh)


@brings("StreamSamples", "FAILED_PRECONDITION", "HAS_LEARNER")
async def streaming_what_is_trained_on(mesh: MeshParts) -> None:
    await mesh.begin()
    await stream(mesh)


@brings("StreamSamples", "INVALID_ARGUMENT", "")
async def streaming_from_nowhere(mesh: MeshParts) -> None:
    await mesh.begin(export_groups=2)
    await stream(mesh, cursor="nowhere")


async def stream(mesh: MeshParts, cursor: str = "") -> None:
    with typed_errors():
        await mesh.run.StreamSamples(pb.StreamSamplesRequest(run=mesh.name, cursor=cursor), timeout=10.0).read()


async def replay(mesh: MeshParts, *dead_ids: int) -> None:
    await mesh.call(mesh.run.ReplayDead, pb.ReplayDeadRequest(run=mesh.name, dead_ids=dead_ids))


@brings("ListDead", "NOT_FOUND", "UNKNOWN_RUN")
async def listing_the_dead_of_nothing(mesh: MeshParts) -> None:
    await mesh.call(mesh.run.ListDead, pb.ListDeadRequest(run="nothing"))


@brings("ReplayDead", "NOT_FOUND", "UNKNOWN_RUN")
async def replaying_for_nothing(mesh: MeshParts) -> None:
    await replay(mesh, 1)


@brings("ReplayDead", "NOT_FOUND", "UNKNOWN_RECORD")
async def replaying_what_never_died(mesh: MeshParts) -> None:
    await mesh.begin()
    await replay(mesh, 99)


@brings("ReplayDead", "FAILED_PRECONDITION", "NOT_REPLAYABLE")
async def replaying_what_is_no_task(mesh: MeshParts) -> None:
    await mesh.begin()
    dead = await mesh.bus.open(f"RM_{mesh.name}_DEAD")
    await dead.append(b"garbage", msg_id="garbage")
    await replay(mesh, 1)


@brings("ReplayDead", "OUT_OF_RANGE", "RUN_ENDED")
async def replaying_after_the_end(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.call(mesh.run.StopRun, pb.StopRunRequest(run=mesh.name))
    await replay(mesh)


# SubmitTasks ----------------------------------------------------------------------------------------------------------


async def submit(mesh: MeshParts, *names: str, prompt: str = "1+1?", **fields: Any) -> None:
    messages = [types_pb2.Message(role="user", content=prompt)]
    tasks = [types_pb2.Task(task_id=name, messages=messages) for name in names]
    await mesh.call(mesh.run.SubmitTasks, pb.SubmitTasksRequest(run=mesh.name, tasks=tasks, **fields))


@brings("SubmitTasks", "NOT_FOUND", "UNKNOWN_RUN")
async def submitting_to_nothing(mesh: MeshParts) -> None:
    await submit(mesh, "a")


@brings("SubmitTasks", "INVALID_ARGUMENT", "")
async def submitting_a_task_twice(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True)
    await submit(mesh, "a", "a")


@brings("SubmitTasks", "ALREADY_EXISTS", "TASK_CONFLICT")
async def submitting_other_content(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True)
    await submit(mesh, "a")
    await submit(mesh, "a", prompt="2+2?")


@brings("SubmitTasks", "FAILED_PRECONDITION", "TASKS_NOT_ACCEPTED")
async def submitting_to_the_data_service(mesh: MeshParts) -> None:
    await mesh.begin()
    await submit(mesh, "a")


@brings("SubmitTasks", "OUT_OF_RANGE", "RUN_ENDED")
async def submitting_after_the_end(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True)
    await mesh.call(mesh.run.StopRun, pb.StopRunRequest(run=mesh.name))
    await submit(mesh, "a")


@brings("SubmitTasks", "RESOURCE_EXHAUSTED", "PAYLOAD_TOO_LARGE")
async def submitting_a_long_task(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True)
    await submit(mesh, "a", prompt="x" * (MIB + 1))


@brings("SubmitTasks", "RESOURCE_EXHAUSTED", "TASK_QUOTA")
async def submitting_more_than_may_wait(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True)
    for call in range(10):
        await submit(mesh, *(f"t{call}.{number}" for number in range(1001)))


# SubmitSamples --------------------------------------------------------------------------------------------------------


PEER = types_pb2.SEGMENT_SOURCE_PEER
ACCEPTS_PEERS: dict[str, Any] = {
    "external_sources": ["peer"],
    "foreign": [events_pb2.ForeignSource(source="peer", max_age="unlimited", share=1.0)],
}


async def give(mesh: MeshParts, *groups: str, said: str = "2", **fields: Any) -> None:
    """Submit a group of one episode for each name."""
    task = types_pb2.Task(task_id="t", messages=[types_pb2.Message(role="user", content="1+1?")])
    action = types_pb2.Segment(
        parent=-1, role=types_pb2.SEGMENT_ROLE_ACTION, source=PEER, messages=[types_pb2.Message(content=said)]
    )
    keys = [types_pb2.EpisodeKey(task="t", group=group, episode="e") for group in groups]
    episodes = [types_pb2.Episode(key=key, segments=[action]) for key in keys]
    request = pb.SubmitSamplesRequest(run=mesh.name, episodes=episodes, tasks=[task], source=PEER, **fields)
    await mesh.call(mesh.run.SubmitSamples, request)


@brings("SubmitSamples", "NOT_FOUND", "UNKNOWN_RUN")
async def giving_samples_to_nothing(mesh: MeshParts) -> None:
    await give(mesh, "k")


@brings("SubmitSamples", "INVALID_ARGUMENT", "")
async def giving_no_samples(mesh: MeshParts) -> None:
    await mesh.begin(**ACCEPTS_PEERS)
    await give(mesh)


@brings("SubmitSamples", "ALREADY_EXISTS", "SAMPLE_CONFLICT")
async def giving_other_samples(mesh: MeshParts) -> None:
    await mesh.begin(**ACCEPTS_PEERS)
    await give(mesh, "k")
    await give(mesh, "k", said="3")


@brings("SubmitSamples", "FAILED_PRECONDITION", "SAMPLES_NOT_ACCEPTED")
async def giving_samples_without_a_bound(mesh: MeshParts) -> None:
    await mesh.begin()
    await give(mesh, "k")


@brings("SubmitSamples", "OUT_OF_RANGE", "RUN_ENDED")
async def giving_samples_after_the_end(mesh: MeshParts) -> None:
    await mesh.begin(**ACCEPTS_PEERS)
    await mesh.call(mesh.run.StopRun, pb.StopRunRequest(run=mesh.name))
    await give(mesh, "k")


@brings("SubmitSamples", "RESOURCE_EXHAUSTED", "PAYLOAD_TOO_LARGE")
async def giving_long_samples(mesh: MeshParts) -> None:
    await mesh.begin(**ACCEPTS_PEERS)
    await give(mesh, "k", said="x" * (2 * MIB + 1))


@brings("SubmitSamples", "RESOURCE_EXHAUSTED", "SAMPLE_QUOTA")
async def giving_more_than_may_wait(mesh: MeshParts) -> None:
    await mesh.begin(**ACCEPTS_PEERS)
    for call in range(5):
        await give(mesh, *(f"k{call}.{number}" for number in range(1024)))


# OpenEpisode, FinishEpisode -------------------------------------------------------------------------------------------


async def open_episode(mesh: MeshParts, key: str = "a", **fields: Any) -> pb.OpenEpisodeResponse:
    return await mesh.call(mesh.run.OpenEpisode, pb.OpenEpisodeRequest(run=mesh.name, key=key, **fields))


async def end_episode(mesh: MeshParts, lease_id: str, limit_s: float = 20.0, **rewards: float) -> None:
    request = pb.FinishEpisodeRequest(run=mesh.name, lease_id=lease_id, rewards=rewards)
    with typed_errors():
        await mesh.run.FinishEpisode(request, timeout=limit_s)


async def served(mesh: MeshParts) -> tuple[coordinator_pb2.EpisodeLease, str]:
    """A run with an episode that the worker serves: the lease at the worker, and its name for the application."""
    await mesh.begin(submitted_tasks=True, group_size=1)
    await submit(mesh, "a")
    (lease,) = await mesh.acquire()
    assert not (await announce(mesh, lease)).finished
    opened = await open_episode(mesh)
    assert opened.base_url == "http://w/v1"
    return lease, opened.lease_id


async def announce(
    mesh: MeshParts, lease: coordinator_pb2.EpisodeLease, wait_s: float = 0.0
) -> coordinator_pb2.ServeEpisodeResponse:
    request = coordinator_pb2.ServeEpisodeRequest(
        node_id=mesh.worker,
        lease_id=lease.lease_id,
        served=pb.OpenEpisodeResponse(base_url="http://w/v1"),
        wait_s=wait_s,
    )
    return await mesh.call(mesh.coordinator.ServeEpisode, request)


async def reported(mesh: MeshParts, lease: coordinator_pb2.EpisodeLease, **fields: Any) -> None:
    """The worker reports the episode without samples."""
    report = coordinator_pb2.EpisodeReport(lease_id=lease.lease_id, key=lease.key, **fields)
    assert await mesh.report([report]) == [""]


@brings("OpenEpisode", "NOT_FOUND", "UNKNOWN_RUN")
async def opening_in_no_run(mesh: MeshParts) -> None:
    await open_episode(mesh)


@brings("OpenEpisode", "INVALID_ARGUMENT", "")
async def opening_an_episode_outside_its_group(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True, group_size=1)
    try:
        await open_episode(mesh, index=1)
    finally:
        assert not (await mesh.state()).submitted.open, "a rejected call submits no task"


@brings("OpenEpisode", "ALREADY_EXISTS", "TASK_CONFLICT")
async def opening_with_another_task(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True)
    await submit(mesh, "a")
    await open_episode(mesh, task=types_pb2.Task(labels={"level": "1"}))


@brings("OpenEpisode", "FAILED_PRECONDITION", "EPISODE_OVER")
async def opening_an_ended_episode(mesh: MeshParts) -> None:
    lease, _ = await served(mesh)
    await reported(mesh, lease, outcome=COMPLETED, failure=types_pb2.Failure(reason="REWARD_LATE"))
    await open_episode(mesh)


@brings("OpenEpisode", "FAILED_PRECONDITION", "TASKS_NOT_ACCEPTED")
async def opening_without_submitted_tasks(mesh: MeshParts) -> None:
    await mesh.begin()
    await open_episode(mesh)


@brings("OpenEpisode", "OUT_OF_RANGE", "RUN_ENDED")
async def opening_after_the_end(mesh: MeshParts) -> None:
    """Also one whose task still waited."""
    await mesh.begin(submitted_tasks=True)
    await submit(mesh, "waits")
    await mesh.call(mesh.run.StopRun, pb.StopRunRequest(run=mesh.name))
    with pytest.raises(RunEnded):
        await open_episode(mesh, "waits")
    await open_episode(mesh)


@brings("OpenEpisode", "RESOURCE_EXHAUSTED", "PAYLOAD_TOO_LARGE")
async def opening_with_a_long_task(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True)
    message = types_pb2.Message(role="user", content="x" * (MIB + 1))
    await open_episode(mesh, task=types_pb2.Task(messages=[message]))


@brings("OpenEpisode", "RESOURCE_EXHAUSTED", "TASK_QUOTA")
async def opening_more_than_may_wait(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True)
    for call in range(10):
        await submit(mesh, *(f"t{call}.{number}" for number in range(1000)))
    await open_episode(mesh)


@brings("OpenEpisode", "UNAVAILABLE", "NOT_READY")
async def opening_without_a_worker(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True)
    await open_episode(mesh, wait_s=0.1)


@brings("FinishEpisode", "NOT_FOUND", "UNKNOWN_RUN")
async def ending_in_no_run(mesh: MeshParts) -> None:
    await end_episode(mesh, "g0.0#1")


@brings("FinishEpisode", "NOT_FOUND", "UNKNOWN_EPISODE")
async def ending_a_later_attempt(mesh: MeshParts) -> None:
    await served(mesh)
    await end_episode(mesh, "g0.0#2")


@brings("FinishEpisode", "INVALID_ARGUMENT", "")
async def ending_with_a_reward_of_no_environment(mesh: MeshParts) -> None:
    _, lease_id = await served(mesh)
    await end_episode(mesh, lease_id, correct=1.0)


@brings("FinishEpisode", "FAILED_PRECONDITION", "EPISODE_OVER")
async def ending_too_late(mesh: MeshParts) -> None:
    lease, lease_id = await served(mesh)
    await reported(mesh, lease, outcome=COMPLETED)
    await end_episode(mesh, lease_id)


@brings("FinishEpisode", "ABORTED", "EPISODE_LOST")
async def ending_a_lost_episode(mesh: MeshParts) -> None:
    lease, lease_id = await served(mesh)
    await reported(mesh, lease, outcome=coordinator_pb2.EPISODE_OUTCOME_INFRA_FAILURE)
    await end_episode(mesh, lease_id)


@brings("FinishEpisode", "UNAVAILABLE", "NOT_READY")
async def ending_before_the_worker_reports(mesh: MeshParts) -> None:
    _, lease_id = await served(mesh)
    await end_episode(mesh, lease_id, limit_s=2.0)


ELSEWHERE = {
    ("CreateRun", "FAILED_PRECONDITION", "MESH_BUSY"): "test_cli_up: it takes inference nodes",
    ("CreateRun", "RESOURCE_EXHAUSTED", "DISK_FULL"): "test_ended_runs",
    ("CreateRun", "RESOURCE_EXHAUSTED", "OVERLOADED"): "test_ended_runs",
    ("CreateRun", "UNAVAILABLE", "NOT_READY"): "test_replay_nodes",
    ("DeleteRun", "UNAVAILABLE", "NOT_READY"): "test_ended_runs",
    ("FinishEpisode", "ALREADY_EXISTS", "EPISODE_CONFLICT"): "test_application_episodes: it takes a scorer",
    ("LeaseBatch", "RESOURCE_EXHAUSTED", "PAYLOAD_TOO_LARGE"): "test_reply_sizes",
    (
        "OpenEpisode",
        "FAILED_PRECONDITION",
        "EPISODES_NOT_SERVED",
    ): "test_application_episodes: it takes a configuration",
    ("StreamSamples", "DATA_LOSS", "PAYLOAD_LOST"): "test_export",
    ("SubmitSamples", "FAILED_PRECONDITION", "TOKENIZER_MISMATCH"): "test_submitted_samples",
    ("SubmitSamples", "UNAVAILABLE", "NOT_READY"): "below: it takes an older node",
    ("SubmitTasks", "UNAVAILABLE", "NOT_READY"): "test_submitted_tasks",
}
"""Promised errors that other tests bring about."""


# The tests ------------------------------------------------------------------------------------------------------------


async def test_every_promised_error_has_a_scenario_and_no_other() -> None:
    assert set(SCENARIOS) | set(ELSEWHERE) == promised()


@pytest.mark.parametrize("error", sorted(SCENARIOS), ids=lambda e: "-".join(filter(None, (e[0], e[2] or e[1]))))
async def test_a_promised_error_arrives_with_its_code_and_reason(
    shared_mesh: MeshParts, error: tuple[str, str, str]
) -> None:
    verb, code, reason = error
    mesh = await shared_mesh.another_run(f"{verb}-{reason or code}"[:60])
    with pytest.raises(MeshError) as caught:
        await SCENARIOS[error](mesh)
    assert caught.value.code.name == code, str(caught.value)
    if reason:
        assert caught.value.reason == reason
    assert str(caught.value), "an error says what to do"
    with contextlib.suppress(MeshError):  # the data service follows a bounded number of live runs
        await mesh.call(mesh.run.StopRun, pb.StopRunRequest(run=mesh.name))


async def test_a_wrong_update_says_which_is_next(shared_mesh: MeshParts) -> None:
    mesh = await shared_mesh.another_run("wrong-update")
    with pytest.raises(MeshError) as caught:
        await leasing_ahead(mesh)
    assert caught.value.metadata["next_update"] == "1"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"publish_every": 5}, "spec.publish_every"),
        ({"group_size": 0}, "spec.group_size"),
        ({"episode_lease_s": -1.0}, "spec.episode_lease_s"),
        ({"beyond": 9}, "spec.beyond"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
async def test_an_impossible_spec_names_its_field(shared_mesh: MeshParts, changes: dict[str, Any], field: str) -> None:
    mesh = await shared_mesh.another_run(field.replace(".", "-"))
    with pytest.raises(MeshError) as caught:
        await mesh.create(**changes)
    assert caught.value.reason == "INVALID_SPEC"
    assert caught.value.violations[0].field == field


async def test_a_run_that_cannot_be_a_streams_name_is_refused(shared_mesh: MeshParts) -> None:
    with pytest.raises(MeshError) as caught:
        await shared_mesh.create(run="no spaces")
    assert (caught.value.code.name, caught.value.reason) == ("INVALID_ARGUMENT", "INVALID_SPEC")


async def test_waits_beyond_the_contract_are_refused(shared_mesh: MeshParts) -> None:
    mesh = await shared_mesh.another_run("waits")
    await mesh.begin()
    with pytest.raises(MeshError) as caught:
        await mesh.lease(1, wait_s=61.0)
    assert caught.value.violations[0].field == "wait_s"


async def test_a_chunk_that_is_missing_is_named(shared_mesh: MeshParts) -> None:
    mesh = await shared_mesh.another_run("chunk")
    await mesh.create()
    await mesh.attach()
    file = weights_pb2.WeightFile(
        name="m.safetensors", size_bytes=3, chunks=[weights_pb2.WeightChunk(digest="ab" * 32, size_bytes=3)]
    )
    kind = weights_pb2.WeightManifest.KIND_FULL
    manifest = weights_pb2.WeightManifest(kind=kind, files=[file], dtype="float32")
    digest = await mesh.put(manifest.SerializeToString())
    version = types_pb2.PolicyVersion(weights_digest=digest)
    request = pb.PublishVersionRequest(run=mesh.name, trainer_epoch=mesh.epoch, version=version)
    with pytest.raises(MeshError) as caught:
        await mesh.call(mesh.run.PublishVersion, request)
    assert caught.value.reason == "NOT_UPLOADED"
    assert caught.value.metadata["first"] == "ab" * 32


async def test_a_spec_is_stored_with_the_contracts_defaults(shared_mesh: MeshParts) -> None:
    mesh = await shared_mesh.another_run("defaults")
    await mesh.create(policy="", learner="", eval_split="")
    assert not (await mesh.create(policy="main", learner="main", eval_split="test")).created
    attached = await mesh.attach()
    assert (attached.spec.policy, attached.spec.eval_split, attached.spec.beyond) == ("main", "test", 1)
    assert msgspec.json.encode(attached.lease_s) == b"30.0"


async def test_a_run_that_is_created_again_has_no_served_episode_of_the_deleted_one(shared_mesh: MeshParts) -> None:
    """The lease ids are the same."""
    mesh = await shared_mesh.another_run("created-again")
    lease, lease_id = await served(mesh)
    ending = asyncio.ensure_future(end_episode(mesh, lease_id))
    assert (await announce(mesh, lease, wait_s=10.0)).finished
    await reported(mesh, lease, outcome=COMPLETED, failure=types_pb2.Failure(reason="DISCARDED"))
    await ending
    await mesh.call(mesh.run.StopRun, pb.StopRunRequest(run=mesh.name))
    await mesh.call(mesh.run.DeleteRun, pb.DeleteRunRequest(run=mesh.name))
    await mesh.begin(submitted_tasks=True, group_size=1)
    await submit(mesh, "a")
    (again,) = await mesh.acquire()
    assert again.lease_id == lease.lease_id
    with pytest.raises(NotReady):
        await open_episode(mesh, wait_s=0.1)
    assert not (await announce(mesh, again)).finished


async def test_calls_that_an_older_node_does_not_know_may_be_repeated_after_its_upgrade(
    shared_mesh: MeshParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = await shared_mesh.another_run("older-node")
    _, lease_id = await served(mesh)
    monkeypatch.setattr(Fleet, "knows", lambda fleet, protocol: False)
    with pytest.raises(NotReady, match="upgrade all nodes"):
        await end_episode(mesh, lease_id, liked=1.0)
    with pytest.raises(NotReady, match="upgrade all nodes"):
        await give(mesh, "k")
