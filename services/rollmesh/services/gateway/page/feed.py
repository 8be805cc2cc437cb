"""What open pages follow: the nodes and runs of the mesh, the state of a run, and its history.

The mesh is read only while a page is open. Each run has one set of readers, whatever the number of pages. A page that
reads slowly gets the newest values: per run there is one value of each kind, and no queue.

    reader              reads                     until
    _read_mesh          GetFleet, GetMesh         no page has been open for IDLE_S
    RunFeed._watch      WatchRun                  the run has no page for IDLE_S, or is deleted
    RunFeed._follow     its ledger, from the last record that was read
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from rollmesh.services.gateway.page.history import RunHistory
from rollmesh.services.gateway.page.plain import plain
from rollmesh.shared.bus.archive_bus import open_ledger
from rollmesh.shared.bus.bus import Bus, StreamLog, UnknownRecord, UnknownStream
from rollmesh.shared.bus.payload_bus import WrongHost
from rollmesh.shared.bus.run_streams import run_of_ledger, run_streams
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.formats import NewerFormat
from rollmesh.shared.domain.ledger_facts import read_record
from rollmesh.shared.errors import DataLoss, MeshError, Overloaded, Unimplemented, UnknownRun
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import coordinator_pb2_grpc, run_pb2, run_pb2_grpc

IDLE_S = 20.0
"""Readers stop when no page has used them for this time."""
RUNS_MAX = 8
"""Number of runs whose history is stored. The least recently used one without a page is dropped."""
LISTED_MAX = 50
"""Number of the newest runs whose progress the list of runs shows."""
_BACKOFF_S = 1.0
_log = logging.getLogger(__name__)


class Sections:
    """The newest value of each kind, with revisions."""

    def __init__(self) -> None:
        self.revision = 0
        self._values: dict[str, tuple[int, bytes]] = {}
        self._changed = asyncio.Event()

    def set(self, name: str, value: bytes) -> None:
        """Replace a value. Readers are notified if it differs."""
        if self._values.get(name, (0, b""))[1] == value:
            return
        self.revision += 1
        self._values[name] = (self.revision, value)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def after(self, revision: int) -> Iterator[tuple[str, bytes]]:
        """Yield the values that were set after `revision`."""
        for name, (at, value) in self._values.items():
            if at > revision:
                yield name, value

    async def wait(self, revision: int) -> None:
        """Return once a value was set after `revision`."""
        while self.revision <= revision:
            await self._changed.wait()


class RunFeed:
    """The state and the history of one run."""

    def __init__(
        self, run: str, stub: run_pb2_grpc.RunServiceAsyncStub, bus: Bus, *, refresh_s: float, clock: Clock
    ) -> None:
        self.run = run
        self.sections = Sections()
        self.history = RunHistory()
        self.state = run_pb2.RunState()
        self.problem = ""
        """Why the ledger cannot be read; empty if it can."""
        self.num_pages = 0
        self.used_s = clock.monotonic_s()
        self.gone = False
        """Whether the run was deleted."""
        self.audits = 0
        """Number of changes of the verdict of its audit."""
        self.caught_up = asyncio.Event()
        """Set once the ledger was read up to where it ended when the feed started."""
        self._target = 0
        self._unreachable = ""
        self._stub: Any = stub
        self._bus = bus
        self._refresh_s = refresh_s
        self._clock = clock
        self._dirty = asyncio.Event()
        self._newest_id = ""
        """Message id of the newest record in the history."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the readers, unless they run."""
        self.used_s = self._clock.monotonic_s()
        if not self._tasks:
            readers: tuple[Coroutine[Any, Any, None], ...] = (self._watch(), self._follow(), self._publish())
            self._tasks = [asyncio.create_task(one, name=f"page of {self.run}") for one in readers]
            for task in self._tasks:
                task.add_done_callback(self._ended)

    @property
    def is_reading(self) -> bool:
        """Whether its readers were started and not stopped."""
        return bool(self._tasks)

    async def stop(self) -> None:
        """Stop the readers. The history remains, and continues with the next start."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def moved(self) -> None:
        """Publish the counters again."""
        self.audits += 1
        self._dirty.set()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Report a bug in a reader to the log and to the pages."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        _log.error("a reader of the page has stopped: run=%s", self.run, exc_info=error)
        self._report(
            f"the page stopped reading because of a bug ({type(error).__name__}); the log of the gateway has it"
        )

    def _report(self, problem: str) -> None:
        """Show why the ledger cannot be read, and answer with what was read."""
        self.problem = problem
        self.caught_up.set()
        self._dirty.set()

    async def _watch(self) -> None:
        while not self.gone:
            call = self._stub.WatchRun(run_pb2.WatchRunRequest(run=self.run))
            try:
                with typed_errors():
                    async for message in call:
                        self.state, self._unreachable = message.state, ""
                        self._dirty.set()
                        if message.state.ended:
                            break
                await self._clock.sleep(max(_BACKOFF_S, self._refresh_s))  # a resumed run has a new state
            except UnknownRun:
                self.gone = True
            except MeshError as error:
                self._unreachable = error.message
                await self._clock.sleep(_BACKOFF_S)
            finally:
                call.cancel()
                self._dirty.set()

    async def _follow(self) -> None:
        self.problem = ""
        while not self.gone:
            try:
                log = await open_ledger(self._bus, self.run)
                self._target = (await log.info()).last_seq
                if not await self._continues(log):
                    self.history = RunHistory()
                    self.caught_up.clear()
                self._note_position()
                async for record in log.follow(self.history.position + 1):
                    self.history.enter(read_record(record.payload, self.run, record.seq), record.seq)
                    self._newest_id = record.msg_id
                    self._note_position()
                    if record.seq % 50 == 0:
                        await asyncio.sleep(0)  # buffered records do not wait
            except UnknownStream:
                self._report("the ledger of this run is not on the bus of this gateway")
                return
            except (DataLoss, NewerFormat, WrongHost) as error:  # of archived records
                self._report(error.message)
                return
            except MeshError as error:
                _log.debug("ledger of the page interrupted: run=%s cause=%s", self.run, error)
                await self._clock.sleep(_BACKOFF_S)

    async def _continues(self, log: StreamLog) -> bool:
        """Return whether the ledger has the newest record of the history. A run that was deleted and created again has
        another ledger."""
        if not self.history.position:
            return True
        try:
            return (await log.read(self.history.position)).msg_id == self._newest_id
        except UnknownRecord:
            return False

    def _note_position(self) -> None:
        if self.history.position >= self._target:
            self.caught_up.set()
        self._dirty.set()

    async def _publish(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            state = {"gone": self.gone, "unreachable": self._unreachable, "state": plain(self.state)}
            self.sections.set("run", msgspec.json.encode(state))
            history = self.history
            moved = {
                "updates": history.updates[-1].update if history.updates else 0,
                "sampled": history.num_sampled,
                "evals": len(self.state.evals),
                "position": history.position,
                "behind": max(0, self._target - history.position),
                "audit": self.audits,
                "problem": self.problem,
            }
            self.sections.set("moved", msgspec.json.encode(moved))
            await self._clock.sleep(self._refresh_s)


class Feed:
    """All feeds of one gateway."""

    def __init__(
        self,
        run: run_pb2_grpc.RunServiceAsyncStub,
        coordinator: coordinator_pb2_grpc.CoordinatorServiceAsyncStub,
        bus: Bus,
        *,
        refresh_s: float,
        call_s: float,
        clock: Clock,
    ) -> None:
        self.mesh = Sections()
        """The section `mesh`: nodes and runs."""
        self._run = run
        self._run_calls: Any = run
        self._coordinator: Any = coordinator
        self._bus = bus
        self._refresh_s = refresh_s
        self._call_s = call_s
        self._clock = clock
        self._runs: OrderedDict[str, RunFeed] = OrderedDict()
        self._ended: dict[str, dict[str, Any]] = {}
        """The progress of ended runs."""
        self._num_pages = 0
        self._used_s = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        """Held while a feed is created, because several requests of a page open its run at the same time."""

    async def close(self) -> None:
        """Stop all readers."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await asyncio.gather(*(feed.stop() for feed in self._runs.values()))

    @property
    def is_reading(self) -> bool:
        """Whether the mesh is being read."""
        return self._reading is not None and not self._reading.done()

    def touch(self) -> None:
        """Read the mesh for at least IDLE_S more."""
        self._used_s = self._clock.monotonic_s()
        if not self.is_reading:
            self._reading = asyncio.create_task(self._read_mesh(), name="page of the mesh")

    @asynccontextmanager
    async def page(self, run: str) -> AsyncIterator[tuple[Sections, ...]]:
        """Yield the sections of an open page: those of the mesh and, if `run` is not empty, of the run. Raise as
        `run_feed`."""
        self.touch()
        feed = await self.run_feed(run) if run else None
        self._num_pages += 1
        if feed is not None:
            feed.num_pages += 1
        try:
            yield (self.mesh,) if feed is None else (self.mesh, feed.sections)
        finally:
            self._num_pages -= 1
            self._used_s = self._clock.monotonic_s()
            if feed is not None:
                feed.num_pages -= 1
                feed.used_s = self._used_s

    async def run_feed(self, run: str) -> RunFeed:
        """Return the feed of a run, started. Raise UnknownRun, Unavailable, InvalidInput, or Overloaded if too many
        runs are open."""
        self.touch()
        feed = self._runs.get(run)
        if feed is None or feed.gone:
            await self.run_state(run)
            async with self._opening:
                feed = self._runs.get(run)
                if feed is None or feed.gone:
                    await self._make_room(run)
                    feed = RunFeed(run, self._run, self._bus, refresh_s=self._refresh_s, clock=self._clock)
                    self._runs[run] = feed
        self._runs.move_to_end(run)
        feed.start()
        return feed

    async def run_state(self, run: str) -> run_pb2.RunState:
        """Return the current state of a run from the coordinator. Raise UnknownRun, Unavailable, InvalidInput."""
        run_streams(run)
        with typed_errors():
            response: run_pb2.GetRunResponse = await self._run_calls.GetRun(
                run_pb2.GetRunRequest(run=run), timeout=self._call_s
            )
        return response.state

    def note_audit(self, run: str) -> None:
        """Notify the pages of a run of a new verdict."""
        if run in self._runs:
            self._runs[run].moved()

    async def _make_room(self, run: str) -> None:
        if (gone := self._runs.pop(run, None)) is not None:
            await gone.stop()
        if len(self._runs) < RUNS_MAX:
            return
        unused = next((name for name, feed in self._runs.items() if not feed.num_pages), None)
        if unused is None:
            raise Overloaded(f"pages of {RUNS_MAX} runs are open at this gateway; close one of them", retry_after_s=5.0)
        await self._runs.pop(unused).stop()

    async def _read_mesh(self) -> None:
        while True:
            self.mesh.set("mesh", msgspec.json.encode(await self.read_mesh()))
            await self._clock.sleep(self._refresh_s)
            for feed in list(self._runs.values()):
                if self._is_idle(feed.num_pages, feed.used_s):
                    await feed.stop()
            if self._is_idle(self._num_pages, self._used_s) and not any(one.is_reading for one in self._runs.values()):
                return

    def _is_idle(self, num_pages: int, used_s: float) -> bool:
        return not num_pages and self._clock.monotonic_s() - used_s >= IDLE_S

    async def read_mesh(self) -> dict[str, Any]:
        """Return nodes and runs of the mesh, or why they cannot be read."""
        try:
            with typed_errors():
                fleet = await self._coordinator.GetFleet(pb.GetFleetRequest(), timeout=self._call_s)
                runs = await self._list_runs()
        except MeshError as error:
            return {"nodes": [], "runs": [], "error": f"The coordinator does not respond: {error.message}"}
        return {"nodes": [plain(node) for node in fleet.nodes], "runs": runs, "error": ""}

    async def _progress(self, run: str, ended: bool) -> dict[str, Any] | None:
        """Return what the list of runs shows; None for a run that was deleted meanwhile. The progress of an ended run
        does not change."""
        if not ended:  # a run that was resumed, or another one with this name
            self._ended.pop(run, None)
        elif run in self._ended:
            return self._ended[run]
        try:
            state = await self.run_state(run)
        except UnknownRun:
            return None
        evals = [one for one in state.evals if one.complete]
        found = {
            "update": sum(policy.applied_step for policy in state.policies),
            "seconds": state.seconds,
            "rewards": dict(evals[-1].mean_rewards if evals else state.mean_rewards),
            "evaluated": bool(evals),
        }
        if ended:
            self._ended[run] = found
        return found

    async def _list_runs(self) -> list[dict[str, Any]]:
        with suppress(Unimplemented):  # a coordinator without a mesh
            with typed_errors():
                mesh = await self._coordinator.GetMesh(pb.GetMeshRequest(), timeout=self._call_s)
            listed = [{"run": run.run, "ended": run.ended} for run in mesh.runs]
            for one in listed[-LISTED_MAX:]:
                one["progress"] = await self._progress(one["run"], bool(one["ended"]))
            return listed
        names = sorted(filter(None, map(run_of_ledger, await self._bus.names())))
        return [{"run": name, "ended": ""} for name in names]
