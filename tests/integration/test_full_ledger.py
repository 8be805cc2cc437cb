"""A ledger that reaches `ledger_bytes_max` ends its run. Other runs, and what remains to be done with that run, go
on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.config import CoordinatorConfig
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import Internal, NotReady, RunEnded, TaskQuota, UnknownRun
from rollmesh.v1 import run_pb2, types_pb2

from .coordinator_mesh import CONFIG, MIB, MeshParts, coordinator_mesh, eventually, spec

KIB = 1 << 10
LIMIT = 32 * KIB
pytestmark = pytest.mark.asyncio(loop_scope="function")


def with_ledgers_of(num_bytes: int) -> CoordinatorConfig:
    run = msgspec.structs.replace(CONFIG.run, ended_idle_s=3600.0)
    return msgspec.structs.replace(
        CONFIG, run=run, streams=msgspec.structs.replace(CONFIG.streams, ledger_bytes_max=num_bytes)
    )


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[MeshParts]:
    async with coordinator_mesh(tmp_path, with_ledgers_of(LIMIT)) as parts:
        yield parts


async def fill(mesh: MeshParts) -> None:
    """Attach until the run has ended, with long names that the ledger stores."""
    async with asyncio.timeout(20):
        while not (await mesh.state()).ended:
            try:
                await mesh.attach(holder="x" * 256)
            except NotReady:
                await asyncio.sleep(0.01)


def failure(mesh: MeshParts) -> object:
    """The error that ends the coordinator's process; None while it leads."""
    assert mesh.node is not None
    assert mesh.node._failure is not None
    return mesh.node._failure.exception() if mesh.node._failure.done() else None


async def test_a_full_ledger_ends_its_run_with_the_setting_and_no_other_run(mesh: MeshParts) -> None:
    other = await mesh.another_run("other")
    await other.begin()
    await mesh.begin()
    await fill(mesh)
    state = await mesh.state()
    assert state.ended.startswith("LEDGER_FULL: ")
    assert (
        f" of {LIMIT} bytes, and the next record does not fit; raise `coordinator.streams.ledger_bytes_max`"
        in state.ended
    )
    assert state.samples.live == 0
    assert failure(mesh) is None
    assert (await audit_run(mesh.bus, "r")).holds
    assert await other.train(1)

    await mesh.restart_coordinator()
    assert (await mesh.state()).ended == state.ended
    assert not (await other.state()).ended
    await mesh.call(mesh.run.StopRun, run_pb2.StopRunRequest(run="r"))
    await mesh.call(mesh.run.DeleteRun, run_pb2.DeleteRunRequest(run="r"))
    with pytest.raises(UnknownRun):
        await mesh.state()
    assert failure(mesh) is None


async def test_submitted_tasks_and_their_keys_leave_room_in_the_ledger(mesh: MeshParts) -> None:
    await mesh.begin(submitted_tasks=True)

    async def submit(number: int) -> None:
        one = types_pb2.Task(task_id=f"t{number}", messages=[types_pb2.Message(role="user", content="x")])
        key = types_pb2.AnswerKey(task_id=one.task_id, answers=["x" * 3 * KIB])
        request = run_pb2.SubmitTasksRequest(run=mesh.name, tasks=[one], answer_keys=[key])
        await mesh.call(mesh.run.SubmitTasks, request)

    for number in range(3):
        await submit(number)
    with pytest.raises(TaskQuota, match="ledger_bytes_max") as caught:
        await asyncio.gather(*map(submit, range(3, 12)))
    assert not caught.value.retryable
    assert not (await mesh.state()).ended
    assert len(await mesh.acquire()) > 0


async def test_a_held_batch_is_committed_and_published_after_the_ledger_is_full(mesh: MeshParts) -> None:
    await mesh.begin()
    await mesh.generate(await mesh.acquire(), step=0)
    batch = await mesh.lease(1)
    stream = await mesh.bus.open(run_streams("r").ledger.name)
    assert mesh.node is not None
    mesh.node.runs._led["r"].driver._ledger._num_bytes = LIMIT  # as if the run had been long
    with suppress(NotReady):
        await mesh.acquire(wait_s=0.1)
    assert (await mesh.state()).ended.startswith("LEDGER_FULL: ")
    digest = (await mesh.commit(1, [batch.lease_id])).digest
    await mesh.checkpoint(1, digest)
    await mesh.publish(1)
    with pytest.raises(RunEnded):
        await mesh.lease(2)
    assert (await stream.info()).bytes_max > LIMIT
    assert (await audit_run(mesh.bus, "r")).holds


async def test_a_run_with_a_full_ledger_goes_on_with_a_larger_one(mesh: MeshParts) -> None:
    await mesh.begin()
    await fill(mesh)
    mesh.config = with_ledgers_of(4 * MIB)
    await mesh.restart_coordinator()
    request = run_pb2.ChangeRunRequest(spec=spec(updates_max=7), change_id="more room")
    assert (await mesh.call(mesh.run.ChangeRun, request)).reopened
    assert not (await mesh.state()).ended
    await mesh.attach()
    for _ in range(200):
        await mesh.attach(holder="x" * 256)
    assert not (await mesh.state()).ended


async def test_a_larger_limit_holds_for_a_live_run_after_a_restart(mesh: MeshParts) -> None:
    await mesh.begin()
    mesh.config = with_ledgers_of(4 * MIB)
    await mesh.restart_coordinator()
    await mesh.state()
    stream = await mesh.bus.open(run_streams("r").ledger.name)
    assert (await stream.info()).bytes_max == 4 * MIB
    for _ in range(200):
        await mesh.attach(holder="x" * 256)


async def test_a_deleted_ledger_costs_its_run_and_not_the_coordinator(mesh: MeshParts) -> None:
    mesh.config = msgspec.structs.replace(mesh.config, run=msgspec.structs.replace(mesh.config.run, append_s_max=0.5))
    await mesh.restart_coordinator()
    other = await mesh.another_run("other")
    await other.begin()
    await mesh.begin()
    await mesh.bus.delete(run_streams("r").ledger.name)

    async def noticed() -> bool:
        try:
            await mesh.attach()
        except NotReady:
            return False
        except Internal as error:
            return "was deleted from NATS" in str(error)
        return False

    await eventually(noticed)
    assert failure(mesh) is None
    await mesh.call(mesh.run.DeleteRun, run_pb2.DeleteRunRequest(run="r"))
    assert (await mesh.create()).created
    assert await other.train(1)
