"""A run that is not led is opened by its first request: once, for all callers, whatever becomes of them, and beside
other runs."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.services.coordinator import runs
from rollmesh.shared.bus.bus import BusUnavailable
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import DataLoss, DeadlineExceeded, Unavailable
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import run_pb2

from .coordinator_mesh import MeshParts, coordinator_mesh, eventually

pytestmark = pytest.mark.asyncio(loop_scope="function")


class SlowRecovery:
    """Recoveries of the run `r` that last until the test opens the gate."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.num_cancelled = 0
        self.gate = asyncio.Event()
        self._recover = vars(runs)["recover"]

    async def __call__(self, log: Any, store: Any) -> Any:
        if log.name == run_streams("r").ledger.name:
            self.num_begun += 1
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        return await self._recover(log, store)


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[MeshParts]:
    """A coordinator with a new folder, before the first request about its runs `r` and `other`."""
    async with coordinator_mesh(tmp_path) as parts:
        await parts.begin()
        await (await parts.another_run("other")).begin()
        await parts.stop_coordinator()
        shutil.rmtree(tmp_path / "coordinator" / "runs")
        await parts.start_coordinator()
        yield parts


@pytest.fixture
def recovery(mesh: MeshParts, monkeypatch: pytest.MonkeyPatch) -> SlowRecovery:
    slow = SlowRecovery()
    monkeypatch.setattr(runs, "recover", slow)
    return slow


async def get(mesh: MeshParts, run: str = "r", timeout_s: float = 20.0) -> run_pb2.RunState:
    with typed_errors():
        response: run_pb2.GetRunResponse = await mesh.decisions.GetRun(
            run_pb2.GetRunRequest(run=run), timeout=timeout_s
        )
    return response.state


async def test_an_opening_survives_its_callers(mesh: MeshParts, recovery: SlowRecovery) -> None:
    for _ in range(3):
        with pytest.raises(DeadlineExceeded):
            await get(mesh, timeout_s=0.3)
    with pytest.raises(DeadlineExceeded), typed_errors():
        await mesh.decisions.DeleteRun(run_pb2.DeleteRunRequest(run="r"), timeout=0.3)
    waiting = [asyncio.create_task(get(mesh)) for _ in range(8)]
    recovery.gate.set()
    assert {state.run for state in await asyncio.gather(*waiting)} == {"r"}
    assert (recovery.num_begun, recovery.num_cancelled) == (1, 0)


async def test_an_opening_blocks_no_other_run(mesh: MeshParts, recovery: SlowRecovery) -> None:
    opening = asyncio.create_task(get(mesh))
    deleting = asyncio.create_task(mesh.call(mesh.run.DeleteRun, run_pb2.DeleteRunRequest(run="r")))

    async def begun() -> bool:
        return recovery.num_begun > 0

    await eventually(begun)
    assert (await get(mesh, "other", 10.0)).run == "other"
    third = await mesh.another_run("third")
    async with asyncio.timeout(10):
        await third.begin()
        await mesh.call(mesh.run.StopRun, run_pb2.StopRunRequest(run="third"))
        await mesh.call(mesh.run.DeleteRun, run_pb2.DeleteRunRequest(run="third"))
    assert not opening.done()
    deleting.cancel()
    recovery.gate.set()
    assert (await opening).run == "r"
    assert recovery.num_begun == 1


async def test_a_coordinator_that_stops_ends_its_openings(mesh: MeshParts, recovery: SlowRecovery) -> None:
    opening = asyncio.create_task(get(mesh))

    async def begun() -> bool:
        return recovery.num_begun > 0

    await eventually(begun)
    async with asyncio.timeout(10):
        await mesh.stop_coordinator()
    assert recovery.num_cancelled == recovery.num_begun
    with pytest.raises(Unavailable):
        await opening


async def test_a_run_that_cannot_be_opened_at_the_start_does_not_keep_the_coordinator_from_others(
    mesh: MeshParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover = vars(runs)["recover"]
    for run in ("r", "other"):
        await get(mesh, run)
    await mesh.stop_coordinator()

    async def away(log: Any, store: Any) -> Any:
        if log.name == run_streams("r").ledger.name:
            raise BusUnavailable("no server leads this stream")
        return await recover(log, store)

    with monkeypatch.context() as patch:
        patch.setattr(runs, "recover", away)
        await mesh.start_coordinator()
        assert (await get(mesh, "other")).run == "other"
        with pytest.raises(BusUnavailable):
            await get(mesh)
    assert (await get(mesh)).run == "r"


async def test_every_caller_gets_the_error_of_an_opening_and_the_next_one_tries_again(
    mesh: MeshParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover = vars(runs)["recover"]

    async def lossy(log: Any, store: Any) -> Any:
        raise DataLoss("a record is damaged")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "recover", lossy)
        for answer in await asyncio.gather(*(get(mesh) for _ in range(4)), return_exceptions=True):
            assert isinstance(answer, DataLoss)
    assert vars(runs)["recover"] is recover
    assert (await get(mesh)).run == "r"
