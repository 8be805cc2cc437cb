"""The runs of a coordinator: created, recovered, found by name, and deleted.

A run is its ledger. Every run with a folder here is recovered at the start. A run whose folder was lost is recovered by
its first request, because its streams are still on the bus. A run that has ended is led until it gets no request for a
while. Then it costs no task and no memory, and its next request recovers it.

Opening a run is a task of the coordinator. All requests for the run wait for the same one, it continues if they are
cancelled, and it delays no other run. What must not happen to one run at the same time has one lock per run.

A run that cannot be led because of a bug returns the same error to every request until the coordinator restarts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

from rollmesh.services.coordinator.archiver import Archiver
from rollmesh.services.coordinator.config import CoordinatorConfig
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.fleet import Fleet, NodeKind, NodeState, WeightGoal
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.driver import RunDriver
from rollmesh.services.coordinator.effects import Effects, Outside
from rollmesh.services.coordinator.housekeeping import Housekeeper
from rollmesh.services.coordinator.ledger import Ledger
from rollmesh.services.coordinator.recovery import Recovered, recover
from rollmesh.services.coordinator.run_storage import Ended, OpenStreams, RunStorage
from rollmesh.services.coordinator.snapshots import SnapshotStore
from rollmesh.services.coordinator.watchdog import Watchdog
from rollmesh.shared.bus.bus import StreamLog
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.formats import NewerFormat
from rollmesh.shared.domain.ids import IdSource
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.domain.protocol import PROTOCOL
from rollmesh.shared.errors import (
    Cancelled,
    DataLoss,
    DiskFull,
    Internal,
    LedgerFull,
    MeshError,
    NotReady,
    Overloaded,
    RunLive,
    UnknownRun,
)
from rollmesh.shared.process.fault_points import Hook, noop
from rollmesh.shared.shared_tasks import SharedTasks
from rollmesh.shared.telemetry import log_context

OPENINGS_MAX = 8
"""Maximum number of runs that are opened at the same time."""
_log = logging.getLogger(__name__)
_REPLAYING = (NodeKind.GATEWAY, NodeKind.LEARNER)
"""Nodes that read `replay_of` of leased samples."""


@dataclass(slots=True, eq=False)
class _Led:
    """A run that this coordinator leads."""

    driver: RunDriver
    keeper: Housekeeper
    asked_s: float
    """Time of the last request for the run."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Loops of housekeeping and watchdog."""

    def spawn(self, loop: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run a loop beside the driver until `stop`. After a bug in it, the driver recovers, and the loop restarts."""
        task = asyncio.create_task(loop(), name=f"{self.driver.run} {name}")
        self.tasks.add(task)

        def ended(_: asyncio.Task[None]) -> None:
            stopped = task not in self.tasks
            self.tasks.discard(task)
            if not stopped and not task.cancelled() and (error := task.exception()) is not None:
                self.driver.recover_from(error)
                self.spawn(loop, name)

        task.add_done_callback(ended)

    async def stop(self) -> None:
        tasks, self.tasks = self.tasks, set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.driver.close()


class Runs:
    """All runs of a coordinator. `on_failure` is called when a run cannot continue."""

    def __init__(
        self,
        storage: RunStorage,
        outside: Outside,
        fleet: Fleet,
        *,
        clock: Clock,
        ids: IdSource,
        config: CoordinatorConfig,
        on_failure: Callable[[str, MeshError], None],
        at: Hook = noop,
    ) -> None:
        """`at` is awaited at each `ArchiveFaultPoint` of each run."""
        self._at = at
        self._storage = storage
        self._outside = outside
        self._fleet = fleet
        self._clock = clock
        self._ids = ids
        self._config = config
        self._on_failure = on_failure
        self._led: dict[str, _Led] = {}
        self._ended: dict[str, Ended] = {}
        self._lost: dict[str, str] = {}
        """Runs that cannot be recovered, with the cause."""
        self._stopping: set[asyncio.Task[None]] = set()
        self._opening: SharedTasks[str, _Led] = SharedTasks("the opening of run")
        self._open_places = asyncio.Semaphore(OPENINGS_MAX)
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._reserving = asyncio.Lock()
        """Held while the room of runs is reserved. It is acquired before the lock of a run."""
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def drivers(self) -> dict[str, RunDriver]:
        """Return the drivers of all led runs: live ones, and ended ones with recent requests."""
        return {run: led.driver for run, led in self._led.items()}

    @property
    def live(self) -> list[RunDriver]:
        """Return the drivers of the runs that have not ended."""
        return [led.driver for led in self._led.values() if led.driver.live]

    @property
    def ended(self) -> Mapping[str, Ended]:
        """Return the runs that have ended and are not led."""
        return self._ended

    @property
    def changed(self) -> asyncio.Event:
        """Set, and replaced by a new event, when a run becomes live or ends."""
        return self._changed

    def goals(self) -> dict[str, WeightGoal]:
        """Return what nodes should serve: the goals of the live runs, or else those of the ended runs."""
        led = {run: led.driver.weight_goal for run, led in self._led.items() if led.driver.weight_goal is not None}
        live = {run: goal for run, goal in led.items() if not goal.ended}
        return live or led | {run: ended.goal for run, ended in self._ended.items()}

    async def recover_all(self) -> None:
        """Recover every run that has a folder here and has not ended."""
        for run in self._storage.runs():
            if (ended := self._storage.ended(run)) is not None:
                self._ended[run] = ended
                continue
            try:
                await self.get(run)
            except UnknownRun:
                _log.warning("run %s has a folder here but no ledger on this bus; it is skipped", run)
            except (MeshError, OSError) as error:  # other runs are not affected
                _log.error("run %s cannot be led until a request for it tries again: %s", run, error)

    async def create(self, spec: RunSpec) -> bool:
        """Create a run. Return whether it is new. Raises RunExists if it exists with another spec, NotReady,
        Overloaded, and DiskFull."""
        try:
            driver = await self.get(spec.run)
        except UnknownRun:
            self._check_nodes(spec)
            driver = await self._make(spec.run)
        return (await driver.submit(lambda ticket: m.CreateRun(ticket=ticket, spec=spec))).created

    async def get(self, run: str) -> RunDriver:
        """Return the driver of a run, and lead the run if it is not led. Raises UnknownRun."""
        led = self._led.get(run)
        if led is None:
            self._check_leads()
            try:
                led = await self._opening.join(run, lambda: self._open(run))
            except Cancelled:
                self._check_leads()
                raise
        led.asked_s = self._clock.monotonic_s()
        return led.driver

    async def reserve(self, run: str) -> None:
        """Reserve the full limits of a run's streams, because a changed run may become live again. Raises DiskFull."""
        async with self._reserving:
            await self._reserve(run)
        if (led := self._led.get(run)) is not None:
            await led.driver.measure_ledger()

    async def delete(self, run: str, forget: Callable[[str], Awaitable[None]]) -> None:
        """Remove an ended run, after `forget` has removed what other services store of it.

        Raises RunLive, UnknownRun if there is nothing to remove, and the errors of `forget`; after those the run still
        exists.
        """
        with suppress(UnknownRun, DataLoss, Internal, NewerFormat, LedgerFull):
            await self.get(run)  # after these errors no live run can come from it; remove the rest of it
        async with self._lock(run):
            if (led := self._led.get(run)) is not None:
                if await led.driver.read(lambda core, _: core.state.spec is not None and not core.state.ended):
                    raise RunLive(
                        f"run {run} is live and cannot be deleted; end it first with `rollmesh stop {run}` (StopRun)",
                        run=run,
                    )
                await forget(run)
                del self._led[run]
                await led.stop()
            self._ended.pop(run, None)
            self._lost.pop(run, None)
            if not await self._storage.delete(run):
                raise UnknownRun(f"there is no run {run!r}", run=run)

    async def retire_forever(self) -> None:
        """Stop leading ended runs without a request for `ended_idle_s`."""
        while True:
            await self._clock.sleep(self._config.run.ended_idle_s / 2)
            await self.retire(self._config.run.ended_idle_s)

    async def retire(self, idle_s: float) -> None:
        """Stop leading every ended run without a request for `idle_s`."""
        async with self._reserving:
            await self._retire(idle_s)

    async def close(self) -> None:
        """Stop leading. All stored state remains."""
        self._closed = True
        await self._opening.close()
        led, self._led = list(self._led.values()), {}
        await asyncio.gather(*(one.stop() for one in led), *self._stopping)

    # Opening ----------------------------------------------------------------------------------------------------------

    def _lock(self, run: str) -> asyncio.Lock:
        """Return the lock of a run, which is held while its streams or its folder change."""
        return self._locks.setdefault(run, asyncio.Lock())

    def _check_leads(self) -> None:
        if self._closed:
            raise NotReady("this coordinator is stopping; retry later")

    async def _open(self, run: str) -> _Led:
        with log_context(run=run):  # also for the tasks that lead it
            async with self._lock(run), self._open_places:
                if run in self._lost:
                    raise Internal(self._lost[run], run=run)
                if run not in self._led:
                    self._led[run] = await self._lead(run, await self._storage.open(run))
                    self._ended.pop(run, None)
                return self._led[run]

    async def _make(self, run: str) -> RunDriver:
        async with self._reserving:
            if len(self.live) >= self._config.runs_max:
                raise Overloaded(
                    f"this coordinator leads {len(self.live)} live runs, `coordinator.runs_max` is "
                    f"{self._config.runs_max}; end one with `rollmesh stop NAME` (StopRun), or use another mesh"
                )
            is_new = await self._reserve(run)
        try:
            return await self.get(run)
        except MeshError:
            if is_new:  # a run may exist that only lacks another stream
                async with self._lock(run):
                    if run not in self._led:  # another request may have opened it meanwhile
                        await self._storage.delete(run)
            raise

    # With `_reserving` held -------------------------------------------------------------------------------------------

    async def _reserve(self, run: str) -> bool:
        """Reserve room for a run, and return whether it is new. If the disk is full, first release the room of ended
        runs."""
        try:
            return await self._storage.make(run)
        except DiskFull:
            await self._retire(0.0)
            for ended in list(self._ended):
                await self._storage.shrink(ended)
            return await self._storage.make(run)

    async def _retire(self, idle_s: float) -> None:
        before_s = self._clock.monotonic_s() - idle_s
        for run, led in list(self._led.items()):
            if led.asked_s <= before_s and led.driver.idle and not led.driver.live and not self._lock(run).locked():
                try:
                    async with self._lock(run):
                        await self._retire_one(run, led)
                except (MeshError, OSError) as error:
                    _log.warning("run %s has ended and keeps its storage for now: %s", run, error)

    async def _retire_one(self, run: str, led: _Led) -> None:
        ended = await led.driver.read(_how_it_ended)
        if ended is None or not led.driver.idle:
            return
        self._ended[run] = ended
        del self._led[run]  # a later request waits and recovers the run again
        try:
            await led.keeper.put_away()
            await self._storage.shrink(run)
        finally:
            await led.stop()
        await asyncio.to_thread(self._storage.mark_ended, run, ended)

    async def _lead(self, run: str, streams: OpenStreams) -> _Led:
        self._storage.make_folder(run)
        self._storage.unmark_ended(run)
        store = self._storage.snapshots(run)
        driver = self._make_driver(run, streams, store)
        try:
            recovered = await driver.start()
        except asyncio.CancelledError:
            await driver.close()
            raise
        except Internal as error:
            self._lost[run] = str(error)
            raise
        keeper = Housekeeper(
            driver,
            store,
            streams.samples,
            clock=self._clock,
            limits=self._config.run,
            position=recovered.snapshot_position,
            archiver=Archiver(driver, streams.ledger, self._config.archive, self._is_current, at=self._at),
            may_link=self._is_current,
        )
        led = _Led(driver, keeper, self._clock.monotonic_s())
        led.spawn(keeper.run, "housekeeping")
        led.spawn(Watchdog(driver, self._fleet, self._clock).run, "watchdog")
        return led

    def _make_driver(self, run: str, streams: OpenStreams, store: SnapshotStore) -> RunDriver:
        core = Core()

        async def restore(ends: bool) -> Recovered:
            recovered = await recover(streams.ledger, store)
            if ends or recovered.state.ended:
                try:
                    await self._storage.shrink(run)  # with room in its ledger again
                except DiskFull as error:
                    raise Internal(str(error), run=run) from error
            else:
                try:
                    await self._storage.extend(run)
                except DiskFull as error:
                    _log.warning("run %s keeps the limit of its ledger: %s", run, error)
            return recovered

        ledger = Ledger(streams.ledger, ids=self._ids, clock=self._clock, append_s_max=self._config.run.append_s_max)
        return RunDriver(
            run,
            core,
            ledger,
            lambda inbox: self._effects(core, inbox, streams.dead),
            clock=self._clock,
            limits=self._config.run,
            restore=restore,
            on_failure=self._on_failure,
            on_lost=self._lose,
            on_live=self._live_changed,
        )

    def _effects(self, core: Core, inbox: RunDriver, dead: StreamLog) -> Effects:
        return Effects(core, inbox, self._outside, dead, clock=self._clock, ids=self._ids, limits=self._config.run)

    def _is_current(self) -> bool:
        """Return whether every node has the coordinator's protocol. One of the release before may read the ledger, and
        does not know archive segments and other names of payload files."""
        return self._fleet.knows(PROTOCOL)

    def _check_nodes(self, spec: RunSpec) -> None:
        """Reject a run with a replay log while a gateway or a learner of the release before would ignore
        `replay_of`."""
        if spec.replay is None:
            return
        for node in self._fleet.nodes.values():
            if node.state is not NodeState.DEAD and node.kind in _REPLAYING and node.protocol < PROTOCOL:
                raise NotReady(
                    f"`run.replay` needs protocol {PROTOCOL} at every gateway and learner, and {node.node_id} has "
                    f"{node.protocol}; upgrade it (docs/upgrades.md), then retry",
                    node=node.node_id,
                )

    def _lose(self, driver: RunDriver, error: Internal) -> None:
        led = self._led.pop(driver.run, None)
        if led is None:
            return
        _log.error("%s", error)
        self._lost[driver.run] = str(error)
        self._live_changed()
        task = asyncio.create_task(led.stop(), name=f"{driver.run} stop")
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def _live_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _how_it_ended(core: Core, head: LedgerHead) -> Ended | None:
    """None while a batch is leased, because its lease must expire first."""
    if not core.state.ended or core.ephemeral.batch_deadlines:
        return None
    return Ended(reason=core.state.ended, position=head.position, goal=core.weight_goal())
