"""A bug, or a broken worker, costs the run that it concerns and no other; the coordinator goes on."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.services.coordinator import runs
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.core import core as core_module
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.shared.errors import Internal, InvalidInput, RunEnded, Unavailable
from rollmesh.v1 import run_pb2

from .coordinator_mesh import MeshParts, coordinator_mesh, eventually

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


async def leased(mesh: MeshParts) -> run_pb2.LeaseBatchResponse:
    await mesh.begin()
    await mesh.generate(await mesh.acquire(), step=0)
    return await mesh.lease(1)


def half_a_commit(turn: DecisionContext, request: i.CommitUpdate) -> None:
    """Has changed the state in memory before it fails."""
    turn.emit(f.BatchReturned(lease_id=request.lease_ids[0], reason="RELEASED"))
    raise ValueError("a bug")


async def test_a_bug_ends_its_run_with_the_cause_and_other_runs_go_on(
    shared_mesh: MeshParts, mesh: MeshParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await shared_mesh.another_run(f"{mesh.name}-other")
    kept = await leased(other)
    batch = await leased(mesh)
    with monkeypatch.context() as patch:
        patch.setitem(core_module._HANDLERS, i.CommitUpdate, half_a_commit)
        with pytest.raises(Internal, match=r"CommitUpdate failed .*ValueError: a bug.*do not repeat"):
            await mesh.commit(1, [batch.lease_id])
        with pytest.raises(RunEnded, match="FAILED: ValueError: a bug"):
            await mesh.commit(1, [batch.lease_id])
    state = await mesh.state()
    assert (state.ended, state.samples.live) == ("FAILED: ValueError: a bug", 0)
    assert (await audit_run(mesh.bus, mesh.name)).holds
    assert (await other.commit(1, [kept.lease_id])).digest
    assert not (await other.state()).ended


async def test_a_read_that_fails_costs_one_call(mesh: MeshParts, monkeypatch: pytest.MonkeyPatch) -> None:
    await mesh.begin()

    def broken(*_: Any) -> Any:
        raise ValueError("Value out of range")

    with monkeypatch.context() as patch:
        patch.setattr("rollmesh.services.coordinator.run_servicer.run_state", broken)
        with pytest.raises(Internal, match="Value out of range"):
            await mesh.state()
    assert not (await mesh.state()).ended


async def test_a_run_that_cannot_be_recovered_answers_with_one_error_and_others_go_on(
    shared_mesh: MeshParts, mesh: MeshParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await shared_mesh.another_run(f"{mesh.name}-other")
    await other.begin()
    batch = await leased(mesh)
    recover = vars(runs)["recover"]

    async def cannot(log: Any, store: Any) -> Any:
        if mesh.name in log.name:
            raise AssertionError("a foreign record")
        return await recover(log, store)

    with monkeypatch.context() as patch:
        patch.setitem(core_module._HANDLERS, i.CommitUpdate, half_a_commit)
        patch.setattr(runs, "recover", cannot)
        with pytest.raises(Internal):
            await mesh.commit(1, [batch.lease_id])
        with pytest.raises(Internal, match="cannot be recovered .*AssertionError: a foreign record"):
            await mesh.state()
    with pytest.raises(Internal, match="restart the coordinator"):
        await mesh.lease(1)
    assert not (await other.state()).ended


async def test_a_bug_outside_the_driver_ends_its_run_and_the_loop_restarts(mesh: MeshParts) -> None:
    await mesh.begin()
    assert mesh.node is not None
    led = mesh.node.runs._led[mesh.name]
    num_runs = 0

    async def one_bug() -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 1:
            raise ValueError("a bug")
        await asyncio.Event().wait()

    led.spawn(one_bug, "a loop")

    async def ended() -> bool:
        return (await mesh.state()).ended == "FAILED: ValueError: a bug"

    await eventually(ended)
    assert num_runs == 2
    assert mesh.node.runs._led[mesh.name] is led


async def test_a_watcher_of_a_broken_run_gets_a_retryable_error(
    mesh: MeshParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await leased(mesh)
    watch = mesh.run.WatchRun(run_pb2.WatchRunRequest(run=mesh.name))
    await watch.read()
    with monkeypatch.context() as patch:
        patch.setitem(core_module._HANDLERS, i.CommitUpdate, half_a_commit)
        with pytest.raises(Internal):
            await mesh.commit(1, [batch.lease_id])

    async def read_again() -> Any:
        async for news in mesh.run.WatchRun(run_pb2.WatchRunRequest(run=mesh.name)):
            return news

    try:
        while not (await mesh.call(lambda _: watch.read(), None)).state.ended:
            pass
    except Unavailable:
        assert (await read_again()).command == run_pb2.TRAINER_COMMAND_STOP


async def test_a_lease_named_twice_is_the_callers_mistake(mesh: MeshParts) -> None:
    batch = await leased(mesh)
    with pytest.raises(InvalidInput, match=r"`lease_ids` must name each once") as caught:
        await mesh.commit(1, [batch.lease_id, batch.lease_id])
    assert caught.value.violations[0].field == "lease_ids"
    assert (await mesh.commit(1, [batch.lease_id])).digest


async def test_a_bad_report_costs_its_own_episode_and_a_bounded_number_of_attempts(mesh: MeshParts) -> None:
    await mesh.begin(tries_max=2)
    leases = await mesh.acquire(4)
    reports = [await mesh.finished(lease, step=0) for lease in leases]
    reports[1].samples[0].num_tokens = 2**63 - 1
    reports[2].samples[0].steps[0].incarnation = 9
    reports[3].lease_id = reports[0].lease_id
    results = await mesh.report(reports)
    assert results[0] == ""
    assert results[1].startswith("INVALID_REPORT: `samples[0].num_tokens` must be in [0, 2147483647]")
    assert results[2].startswith("INVALID_REPORT: sample g1.0.0: no weights of step 0, incarnation 9")
    assert results[3] == "UNKNOWN_LEASE"
    again = {lease.key.episode: lease for lease in await mesh.acquire(2)}
    assert set(again) == {leases[1].key.episode, leases[2].key.episode}
    report = await mesh.finished(again[leases[1].key.episode], step=0)
    report.samples[0].sample_id = "odd"
    await mesh.report([report])

    async def dead_lettered() -> bool:
        letters = await mesh.call(mesh.run.ListDead, run_pb2.ListDeadRequest(run=mesh.name))
        return ["invalid report: `samples[0].sample_id`" in one.letter.cause for one in letters.letters] == [True]

    await eventually(dead_lettered)
    assert not (await mesh.state()).ended
