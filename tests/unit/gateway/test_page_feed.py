"""The readers of the page: one set per run, stopped when no page needs them, and right after a run was replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from rollmesh.services.gateway.page import feed as module
from rollmesh.services.gateway.page.feed import IDLE_S, Feed, RunFeed
from rollmesh.services.gateway.page.history import RunHistory
from rollmesh.shared.bus.archive_bus import LostRecords
from rollmesh.shared.bus.bus import StreamRecord
from rollmesh.shared.bus.payload_bus import WrongHost
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.domain.formats import NewerFormat
from rollmesh.shared.domain.ledger_head import RECORD_FORMAT
from rollmesh.shared.errors import MeshError, UnknownRun
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import events_pb2 as ev
from rollmesh.v1 import run_pb2, types_pb2


class Watch:
    """A call of WatchRun that returns one state and lasts until it is cancelled."""

    def __init__(self, run: str, calls: set[Watch]) -> None:
        self._run, self._calls = run, calls
        self._ended = asyncio.Event()
        calls.add(self)

    async def __aiter__(self) -> AsyncIterator[run_pb2.WatchRunResponse]:
        yield run_pb2.WatchRunResponse(state=run_pb2.RunState(run=self._run))
        await self._ended.wait()

    def cancel(self) -> None:
        self._calls.discard(self)


class Services:
    """A coordinator whose runs always exist. Its answers take a turn of the loop."""

    def __init__(self) -> None:
        self.watches: set[Watch] = set()
        self.missing: set[str] = set()
        self.seconds = 0.0
        self.mesh = pb.GetMeshResponse()

    async def GetRun(self, request: run_pb2.GetRunRequest, timeout: float) -> run_pb2.GetRunResponse:  # noqa: ASYNC109
        await asyncio.sleep(0)
        if request.run in self.missing:
            raise UnknownRun(f"there is no run {request.run!r}")
        return run_pb2.GetRunResponse(state=run_pb2.RunState(run=request.run, seconds=self.seconds))

    def WatchRun(self, request: run_pb2.WatchRunRequest) -> Watch:
        return Watch(request.run, self.watches)

    async def GetFleet(self, request: pb.GetFleetRequest, timeout: float) -> pb.GetFleetResponse:  # noqa: ASYNC109
        return pb.GetFleetResponse()

    async def GetMesh(self, request: pb.GetMeshRequest, timeout: float) -> pb.GetMeshResponse:  # noqa: ASYNC109
        return self.mesh


class World:
    """A feed over a bus in memory, with a clock that the test advances."""

    def __init__(self) -> None:
        self.bus, self.clock, self.services = MemoryBus(), ManualClock(), Services()
        stub: Any = self.services
        self.feed = Feed(stub, stub, self.bus, refresh_s=1.0, call_s=1.0, clock=self.clock)

    async def ledger(self, run: str, *facts: ev.Fact) -> None:
        """Create the ledger of a run with a record for each fact."""
        log = await self.bus.create(run_streams(run).ledger)
        for number, fact in enumerate((ev.Fact(run_created=ev.RunCreated(spec=ev.RunSpec(run=run))), *facts)):
            record = ev.LedgerRecord(record_id=f"{id(log)}-{number}", time_unix_s=1000.0 + number, facts=[fact])
            await log.append(record.SerializeToString(), msg_id=record.record_id)

    async def settle(self, condition: Callable[[], bool]) -> None:
        """Advance the clock until the condition holds."""
        async with asyncio.timeout(10):
            while not condition():
                self.clock.advance(1.0)
                for _ in range(10):
                    await asyncio.sleep(0)


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    found = World()
    try:
        yield found
    finally:
        await found.feed.close()


async def together(*calls: Awaitable[RunFeed]) -> list[RunFeed]:
    async with asyncio.timeout(10):
        return list(await asyncio.gather(*calls))


async def test_requests_at_the_same_time_share_the_readers_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUNS_MAX", 1)
    async with world() as one:
        for run in ("a", "b"):
            await one.ledger(run)
        await one.feed.run_feed("a")
        feeds = await together(
            *(one.feed.run_feed("b") for _ in range(4))
        )  # a page opens its run with several requests
        assert len({id(feed) for feed in feeds}) == 1
        await one.settle(lambda: len(one.services.watches) == 1)
        await one.settle(lambda: not one.feed.is_reading)
        assert not one.services.watches, "no reader is left"


async def test_readers_stop_without_pages_and_start_again() -> None:
    async with world() as one:
        await one.ledger("a")
        async with one.feed.page("a") as sections:
            await one.settle(lambda: len(one.services.watches) == 1 and sections[1].revision > 0)
            one.clock.advance(2 * IDLE_S)
            await one.settle(lambda: one.feed.is_reading)
            assert one.services.watches, "the page is open"
        await one.settle(lambda: not one.feed.is_reading)
        assert not one.services.watches
        async with one.feed.page("a"):
            await one.settle(lambda: len(one.services.watches) == 1)


async def test_a_page_that_opens_while_the_readers_stop_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    stopping, may_stop = asyncio.Event(), asyncio.Event()
    stop = RunFeed.stop

    async def slow_stop(feed: RunFeed) -> None:
        stopping.set()
        await may_stop.wait()
        await stop(feed)

    async with world() as one:
        for run in ("a", "b"):
            await one.ledger(run)
        await one.feed.run_feed("a")
        monkeypatch.setattr(RunFeed, "stop", slow_stop)
        await one.settle(stopping.is_set)
        async with one.feed.page("b") as (mesh, _):
            may_stop.set()
            await one.settle(lambda: len(one.services.watches) == 1)
            revision = mesh.revision
            one.services.GetMesh = mesh_with_run  # type: ignore[method-assign]
            await one.settle(lambda: mesh.revision > revision)
            assert one.feed.is_reading


async def mesh_with_run(request: pb.GetMeshRequest, timeout: float) -> pb.GetMeshResponse:  # noqa: ASYNC109
    return pb.GetMeshResponse(runs=[pb.MeshRun(run="b")])


async def test_a_run_that_was_created_again_has_its_own_history() -> None:
    reserved = ev.Fact(group_reserved=ev.GroupReserved(group="g0", task=types_pb2.Task(task_id="t")))
    async with world() as one:
        await one.ledger("a", *[reserved] * 5)
        feed = await one.feed.run_feed("a")
        await one.settle(lambda: feed.history.position == 6)
        await one.settle(lambda: not one.feed.is_reading)
        await one.bus.delete(run_streams("a").ledger.name)
        await one.ledger("a", *[reserved] * 7)
        assert await one.feed.run_feed("a") is feed
        await one.settle(lambda: feed.history.position == 8)
        assert feed.history.group_begin("g0") == 8
        assert len(feed.history._groups) == 1
        await one.settle(lambda: not one.feed.is_reading)
        before = feed.history
        await one.feed.run_feed("a")
        await one.settle(lambda: feed.is_reading and feed.caught_up.is_set())
        assert feed.history is before, "the same ledger is continued"


@pytest.mark.parametrize("error", [LostRecords("segment lost"), NewerFormat("newer segment"), WrongHost("elsewhere")])
async def test_archived_records_that_cannot_be_read_are_shown(
    error: MeshError, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world() as one:
        await one.ledger("a")

        async def follow(*_: object) -> AsyncIterator[StreamRecord]:
            raise error
            yield

        monkeypatch.setattr(type(await one.bus.open(run_streams("a").ledger.name)), "follow", follow)
        feed = await one.feed.run_feed("a")
        await one.settle(lambda: feed.problem == error.message)


async def test_a_value_of_a_newer_release_is_shown_by_its_number() -> None:
    reward = types_pb2.Reward(name="correct", value=1.0, segment=-1, outcome=77)  # type: ignore[arg-type]
    scored = ev.EpisodeScored(
        group="g0", episode="g0.0", samples=[types_pb2.SampleMeta(sample_id="g0.0-0", rewards=[reward])]
    )
    reserved = ev.GroupReserved(group="g0", purpose=99)  # type: ignore[arg-type]
    async with world() as one:
        await one.ledger("a", ev.Fact(group_reserved=reserved), ev.Fact(episode_scored=scored))
        feed = await one.feed.run_feed("a")
        await one.settle(lambda: feed.history.position == 3)
        (shown,) = feed.history.recent
        assert (shown.purpose, shown.rewards[0].outcome) == ("99", "77")
        assert feed.problem == ""


@pytest.mark.parametrize(
    ("payload", "what"),
    [
        (b"\xff\xff", "ledger record 2 of a cannot be read: "),
        (
            ev.LedgerRecord(format=RECORD_FORMAT + 1).SerializeToString(),
            f"ledger record 2 of a has format {RECORD_FORMAT + 1}, and this release reads",
        ),
    ],
)
async def test_a_record_that_cannot_be_read_is_shown(payload: bytes, what: str) -> None:
    async with world() as one:
        await one.ledger("a")
        await (await one.bus.open(run_streams("a").ledger.name)).append(payload, msg_id="x")
        feed = await one.feed.run_feed("a")
        await one.settle(lambda: feed.problem != "")
        assert feed.problem.startswith(what)


async def test_a_bug_in_a_reader_is_shown_and_no_answer_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def enter(*_: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(RunHistory, "enter", enter)
    async with world() as one:
        await one.ledger("a")
        feed = await one.feed.run_feed("a")
        async with asyncio.timeout(10):
            await feed.caught_up.wait()
        assert "LookupError" in feed.problem


async def test_the_list_shows_the_progress_of_a_run_that_ended_and_was_resumed() -> None:
    async with world() as found:
        shown = []
        for ended, seconds in (("", 1.0), ("COMPLETE", 2.0), ("COMPLETE", 3.0), ("", 4.0), ("COMPLETE", 5.0)):
            found.services.seconds = seconds
            found.services.mesh = pb.GetMeshResponse(runs=[pb.MeshRun(run="one", ended=ended)])
            (run,) = (await found.feed.read_mesh())["runs"]
            shown.append(run["progress"]["seconds"])
        assert shown == [1.0, 2.0, 2.0, 4.0, 5.0], "an ended run is read once"
