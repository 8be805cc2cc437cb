"""Following the ledger: catching up, snapshot and restore, and the cause of a stall."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.services.data.engine import DataEngine
from rollmesh.services.data.follower import RunFollower
from rollmesh.services.data.selectors.uniform import UniformSelector
from rollmesh.services.data.snapshots import SnapshotFolder
from rollmesh.services.data.task import Split
from rollmesh.shared.bus.bus import BusUnavailable, StreamLog
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.errors import CatchingUp, CorruptSnapshot, DataLoss, ResourceExhausted, UnknownRun, UnknownSplit
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import events_pb2

from .builders import created, ended, factory, finalized, pool, record, reserved


@pytest_asyncio.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    made = MemoryBus()
    await made.create(run_streams("r").ledger)
    yield made
    await made.close()


def engine(bus: Any, *, clock: ManualClock | None = None, **settings: Any) -> DataEngine:
    return DataEngine(
        pools={Split.TRAIN: pool(30), Split.VALIDATION: pool(0), Split.TEST: pool(4)},
        bus=bus,
        clock=clock or ManualClock(),
        **{"new_selector": factory(), "catch_up_s_max": 5.0, **settings},
    )


async def write(bus: MemoryBus, *facts: events_pb2.Fact, run: str = "r") -> int:
    ledger = await bus.open(run_streams(run).ledger.name)
    last = (await ledger.info()).last_seq
    return await ledger.append(record(*facts).SerializeToString(), msg_id=f"m{last}", expected_last_seq=last)


async def write_history(bus: MemoryBus, draws: DataEngine, num_groups: int, first: int = 0) -> int:
    """Write groups that the engine draws, every second one solved. Return the last sequence of the ledger."""
    position = await write(bus, created())
    for draw in range(first, first + num_groups):
        ((_, task, _),) = await draws.next_tasks(
            run="r", policy="main", first_draw=draw, num=1, ledger_position=position
        )
        await write(bus, reserved(draw, task.task_id))
        position = await write(bus, finalized(draw, float(draw % 2), 0.5))
    return position


async def ids(draws: DataEngine, first: int, num: int, position: int = 0) -> list[str]:
    tasks = await draws.next_tasks(run="r", policy="main", first_draw=first, num=num, ledger_position=position)
    return [task.task_id for _, task, _ in tasks]


async def test_a_restarted_service_draws_as_the_one_before(bus: MemoryBus) -> None:
    first = engine(bus)
    position = await write_history(bus, first, 12)
    expected = await ids(first, 12, 6, position)
    await first.close()
    second = engine(bus)
    assert await ids(second, 12, 6) == expected, "also without naming a position: it waits for what the ledger held"
    await second.close()


async def test_a_selector_prepares_its_draws_in_another_thread(bus: MemoryBus) -> None:
    prepared: list[tuple[int, int, bool]] = []

    class Slow(UniformSelector):
        def prepare(self, first: int, num: int) -> None:
            prepared.append((first, num, threading.current_thread() is threading.main_thread()))
            super().prepare(first, num)

    draws = engine(bus, new_selector=lambda tasks: Slow(pool=tasks, seed=0))
    position = await write(bus, created())
    assert len(await ids(draws, 4, 3, position)) == 3
    assert prepared == [(4, 3, False)]
    await draws.close()


async def test_a_restored_service_draws_as_one_that_folded_everything(bus: MemoryBus) -> None:
    first, second = engine(bus), engine(bus)
    middle = await write_history(bus, first, 6)
    state, position = await first.snapshot("r")
    assert position == middle
    last = await write_history(bus, first, 6, first=6)
    assert await second.restore("r", state) == middle
    assert await ids(second, 12, 6, last) == await ids(first, 12, 6, last)
    await first.close()
    await second.close()


async def test_a_position_that_is_not_folded_in_time_is_named(bus: MemoryBus) -> None:
    draws = engine(bus, catch_up_s_max=0.01)
    position = await write(bus, created())
    with pytest.raises(CatchingUp, match=f"up to {position} of 9") as caught:
        await ids(draws, 0, 1, position=9)
    assert caught.value.retry_after_s is not None
    await draws.close()


class Interrupted:
    """A bus whose ledger cannot be followed until `release`."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self.through = False

    async def open(self, name: str) -> Any:
        ledger = await self._bus.open(name)
        return _InterruptedLog(ledger, self)


class _InterruptedLog:
    def __init__(self, ledger: StreamLog, bus: Interrupted) -> None:
        self._ledger, self._bus = ledger, bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def follow(self, from_seq: int = 1) -> AsyncIterator[Any]:
        if not self._bus.through:
            raise BusUnavailable("nats is down")
        async for found in self._ledger.follow(from_seq):
            yield found


async def test_a_bus_that_is_down_is_the_named_cause_and_following_resumes(bus: MemoryBus) -> None:
    await write(bus, created())
    clock, flaky = ManualClock(), Interrupted(bus)
    draws = engine(flaky, clock=clock, catch_up_s_max=0.05)
    with pytest.raises(CatchingUp, match="nats is down"):
        await ids(draws, 0, 1)
    flaky.through = True
    clock.advance(1.0)
    assert len(await ids(draws, 0, 1)) == 1
    await draws.close()


async def test_an_unreadable_ledger_is_data_loss_and_not_a_wrong_answer(bus: MemoryBus) -> None:
    ledger = await bus.open(run_streams("r").ledger.name)
    await ledger.append(b"\xff\xff\xff", msg_id="x")
    draws = engine(bus)
    with pytest.raises(DataLoss, match="ledger record 1 of r"):
        await ids(draws, 0, 1)
    with pytest.raises(DataLoss):
        await ids(draws, 0, 1)
    await draws.close()


async def test_a_snapshot_of_another_run_or_a_later_ledger_is_refused_and_following_continues(bus: MemoryBus) -> None:
    await bus.create(run_streams("other").ledger)
    draws = engine(bus)
    await write_history(bus, draws, 3)
    state, _ = await draws.snapshot("r")
    with pytest.raises(CorruptSnapshot, match="of run r, expected .* of run other"):
        await draws.restore("other", state)
    await bus.delete(run_streams("r").ledger.name)
    await bus.create(run_streams("r").ledger)
    fresh = engine(bus)
    with pytest.raises(CorruptSnapshot, match=r"record \d+ of the ledger of r must have the id"):
        await fresh.restore("r", state)
    with pytest.raises(CorruptSnapshot, match="not a snapshot"):
        await fresh.restore("r", b"junk")
    assert await write(bus, created()) == 1
    assert len(await ids(fresh, 0, 2, position=1)) == 2
    await draws.close()
    await fresh.close()


async def test_a_selector_that_cannot_learn_is_logged_once(bus: MemoryBus, caplog: pytest.LogCaptureFixture) -> None:
    draws = engine(bus, success_reward="correkt")
    position = await write_history(bus, draws, 3)
    await ids(draws, 3, 1, position)
    assert [entry.message.count("no reward `correkt`") for entry in caplog.records] == [1]
    await draws.close()


async def test_an_unknown_run_is_named(bus: MemoryBus) -> None:
    draws = engine(bus)
    with pytest.raises(UnknownRun, match="run `none` has no ledger"):
        await draws.next_tasks(run="none", policy="main", first_draw=0, num=1)


async def test_runs_beyond_the_limit_are_refused_until_one_has_ended(bus: MemoryBus) -> None:
    await bus.create(run_streams("s").ledger)
    draws = engine(bus, runs_max=1)
    await ids(draws, 0, 1)
    with pytest.raises(ResourceExhausted, match="runs_max"):
        await draws.next_tasks(run="s", policy="main", first_draw=0, num=1)
    position = await write(bus, ended())
    await ids(draws, 0, 1, position)
    assert await draws.next_tasks(run="s", policy="main", first_draw=0, num=1)
    await draws.close()


async def test_evaluation_takes_a_split_in_order() -> None:
    draws = engine(None)
    assert [(draw, task.task_id) for draw, task in await draws.tasks_in_order(split="test", first_draw=1, num=9)] == [
        (1, "t1"),
        (2, "t2"),
        (3, "t3"),
    ]
    with pytest.raises(UnknownSplit, match="the split `validation` has no tasks; splits with tasks: train, test"):
        await draws.tasks_in_order(split="validation", first_draw=0, num=1)
    with pytest.raises(UnknownSplit, match="dev"):
        await draws.tasks_in_order(split="dev", first_draw=0, num=1)


class Watched:
    """A bus that records the first sequence of each follower."""

    def __init__(self, bus: MemoryBus) -> None:
        self._bus = bus
        self.followed_from: list[int] = []

    async def open(self, name: str) -> Any:
        return _WatchedLog(await self._bus.open(name), self)


class _WatchedLog:
    def __init__(self, ledger: StreamLog, bus: Watched) -> None:
        self._ledger, self._bus = ledger, bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    def follow(self, first: int) -> Any:
        self._bus.followed_from.append(first)
        return self._ledger.follow(first)


@pytest.mark.parametrize("orderly", [True, False], ids=["closed", "killed"])
async def test_a_service_with_a_snapshot_reads_only_what_came_after_and_draws_the_same(
    bus: MemoryBus, tmp_path: Path, orderly: bool
) -> None:
    first = engine(bus, snapshots=SnapshotFolder(tmp_path / "live"), snapshot_records=4)
    middle = await write_history(bus, first, 6)
    await first.snapshot("r")  # wait until everything is folded
    if orderly:
        await first.close()
    shutil.copytree(tmp_path / "live", tmp_path / "left")  # the files after a kill
    saved = max(int(path.stem) for path in (tmp_path / "left" / "r").glob("*.snapshot"))
    assert 0 < saved <= middle
    snapshots = SnapshotFolder(tmp_path / "left")
    whole = engine(bus)
    last = await write_history(bus, whole, 6, first=6)
    watched = Watched(bus)
    second = engine(watched, snapshots=snapshots)
    assert await second.snapshot("r") == await whole.snapshot("r")
    assert watched.followed_from == [saved + 1]
    assert await ids(second, 12, 6, last) == await ids(whole, 12, 6, last)
    for each in (first, second, whole):
        await each.close()


async def test_a_state_in_a_checkpoint_serves_where_the_folder_was_lost(bus: MemoryBus, tmp_path: Path) -> None:
    first = engine(bus)
    position = await write_history(bus, first, 6)
    state, _ = await first.snapshot("r")
    (tmp_path / "empty.bin").touch()  # a checkpoint that was written while the service was down
    (tmp_path / "state.bin").write_bytes(state)
    watched = Watched(bus)
    more = [tmp_path / "absent.bin", tmp_path / "empty.bin", tmp_path / "state.bin"]
    second = engine(watched, snapshots=SnapshotFolder(tmp_path / "lost", more=lambda: more))
    last = await write_history(bus, first, 2, first=6)
    assert await ids(second, 8, 6, last) == await ids(first, 8, 6, last)
    assert watched.followed_from == [position + 1]
    await first.close()
    await second.close()


@pytest.mark.parametrize("trouble", ["damaged", "of another ledger"])
async def test_an_unusable_snapshot_is_passed_by_for_the_whole_ledger(
    bus: MemoryBus, tmp_path: Path, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    snapshots = SnapshotFolder(tmp_path)
    first = engine(bus, snapshots=snapshots)
    await write_history(bus, first, 6)
    await first.close()
    (path,) = (tmp_path / "r").iterdir()
    bus_now = bus
    if trouble == "damaged":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        bus_now = MemoryBus()
        await bus_now.create(run_streams("r").ledger)
        ledger = await bus_now.open(run_streams("r").ledger.name)
        for seq in range(20):
            await ledger.append(record(created()).SerializeToString(), msg_id=f"x{seq}", expected_last_seq=seq)
    watched = Watched(bus_now)
    second, fresh = engine(watched, snapshots=snapshots), engine(bus_now)
    assert await second.snapshot("r") == await fresh.snapshot("r")
    assert watched.followed_from == [1]
    assert "snapshot skipped" in caplog.text
    await second.close()
    await fresh.close()


async def test_an_opening_survives_its_callers_and_delays_no_other_run(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bus.create(run_streams("other").ledger)
    draws = engine(bus)
    gate, num_begun, begin = asyncio.Event(), 0, RunFollower.open

    async def slow(self: RunFollower) -> None:
        nonlocal num_begun
        if self.run == "r":
            num_begun += 1
            await gate.wait()
        await begin(self)

    monkeypatch.setattr(RunFollower, "open", slow)
    first, second = (asyncio.create_task(draws.snapshot("r")) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    async with asyncio.timeout(5):
        assert (await draws.snapshot("other"))[1] == 0
    gate.set()
    await second
    assert num_begun == 1
    await draws.close()
