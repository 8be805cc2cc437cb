"""The runs of a coordinator: created, recovered, found by name, and deleted.

A run is its ledger. Every run with a folder here is recovered at the start. A run whose folder was lost is recovered by
its first request, because its streams are still on the bus. A run that has ended is led until it gets no request for a
while. Then it costs no task and no memory, and its next request recovers it.

A run that cannot be led because of a bug returns the same error to every request until the coordinator restarts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.services.coordinator.config import CoordinatorConfig
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.fleet import Fleet, WeightGoal
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
from rollmesh.shared.errors import DataLoss, DiskFull, Internal, MeshError, NotReady, Overloaded, RunLive, UnknownRun
from rollmesh.shared.formats import NewerFormat
from rollmesh.shared.ids import IdSource
from rollmesh.shared.ledger_head import EMPTY, LedgerHead
from rollmesh.shared.telemetry import log_context

_log = logging.getLogger(__name__)


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
    ) -> None:
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
        self._opening = asyncio.Lock()
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
            except (
                DataLoss,
                Internal,
                NewerFormat,
            ) as error:  # every request for this run gets this error; other runs are not affected
                _log.error("run %s cannot be led: %s", run, error)
            except UnknownRun:
                _log.warning("run %s has a folder here but no ledger on this bus; it is skipped", run)

    async def create(self, spec: RunSpec) -> bool:
        """Create a run. Return whether it is new. Raises RunExists if it exists with another spec, Overloaded, and
        DiskFull."""
        try:
            driver = await self.get(spec.run)
        except UnknownRun:
            driver = await self._make(spec.run)
        return bool(await driver.submit(lambda ticket: i.CreateRun(ticket=ticket, spec=spec)))

    async def get(self, run: str) -> RunDriver:
        """Return the driver of a run, and lead the run if it is not led. Raises UnknownRun."""
        led = self._led.get(run)
        if led is None:
            async with self._opening:
                led = await self._open(run)
        led.asked_s = self._clock.monotonic_s()
        return led.driver

    async def reserve(self, run: str) -> None:
        """Reserve the full limits of a run's streams, because a changed run may become live again. Raises DiskFull."""
        async with self._opening:
            await self._reserve(run)

    async def delete(self, run: str, forget: Callable[[str], Awaitable[None]]) -> None:
        """Remove an ended run, after `forget` has removed what other services store of it.

        Raises RunLive, UnknownRun if there is nothing to remove, and the errors of `forget`; after those the run still
        exists.
        """
        async with self._opening:
            try:
                led = await self._open(run)
            except (UnknownRun, DataLoss, Internal, NewerFormat):
                led = None  # no live run can come from it; remove the rest of it
            if led is not None:
                if await led.driver.read(lambda core, _: core.state.spec is not None and not core.state.ended):
                    raise RunLive(
                        f"run {run} is live and cannot be deleted; end it first with `rollmesh stop {run}` (StopRun)",
                        run=run,
                    )
                await forget(run)
                del self._led[run]
                await led.stop()
            self._ended.pop(run, None)
            if not await self._storage.delete(run):
                raise UnknownRun(f"there is no run {run!r}", run=run)

    async def retire_forever(self) -> None:
        """Stop leading ended runs without a request for `ended_idle_s`."""
        while True:
            await self._clock.sleep(self._config.run.ended_idle_s / 2)
            await self.retire(self._config.run.ended_idle_s)

    async def retire(self, idle_s: float) -> None:
        """Stop leading every ended run without a request for `idle_s`."""
        async with self._opening:
            await self._retire(idle_s)

    async def close(self) -> None:
        """Stop leading. All stored state remains."""
        self._closed = True
        led, self._led = list(self._led.values()), {}
        await asyncio.gather(*(one.stop() for one in led), *self._stopping)

    # With `_opening` held ---------------------------------------------------------------------------------------------

    async def _open(self, run: str) -> _Led:
        if self._closed:
            raise NotReady("this coordinator is stopping; retry later")
        if run in self._lost:
            raise Internal(self._lost[run], run=run)
        if run not in self._led:
            with log_context(run=run):  # also for the tasks that lead it
                self._led[run] = await self._lead(run, await self._storage.open(run))
            self._ended.pop(run, None)
        return self._led[run]

    async def _make(self, run: str) -> RunDriver:
        async with self._opening:
            if len(self.live) >= self._config.runs_max:
                raise Overloaded(
                    f"this coordinator leads {len(self.live)} live runs, `coordinator.runs_max` is {self._config.runs_max}; "
                    "end one with `rollmesh stop NAME` (StopRun), or use another mesh"
                )
            is_new = await self._reserve(run)
            try:
                return (await self._open(run)).driver
            except MeshError:
                if is_new:  # a run may exist that only lacks another stream
                    await self._storage.delete(run)
                raise

    async def _reserve(self, run: str) -> bool:
        """Reserve room for a run, and return whether it is new. If the disk is full, first release the room of ended runs."""
        try:
            return await self._storage.make(run)
        except DiskFull:
            await self._retire(0.0)
            for ended in self._ended:
                await self._storage.shrink(ended)
            return await self._storage.make(run)

    async def _retire(self, idle_s: float) -> None:
        before_s = self._clock.monotonic_s() - idle_s
        for run, led in list(self._led.items()):
            if led.asked_s <= before_s and led.driver.idle and not led.driver.live:
                try:
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
        )
        led = _Led(driver, keeper, self._clock.monotonic_s())
        led.spawn(keeper.run, "housekeeping")
        led.spawn(Watchdog(driver, self._fleet, self._clock).run, "watchdog")
        return led

    def _make_driver(self, run: str, streams: OpenStreams, store: SnapshotStore) -> RunDriver:
        core = Core()

        async def restore() -> Recovered:
            recovered = await recover(streams.ledger, store)
            if recovered.state.ended:
                await self._storage.shrink(run)  # with room in its ledger again
            return recovered

        ledger = Ledger(
            streams.ledger, head=EMPTY, ids=self._ids, clock=self._clock, append_s_max=self._config.run.append_s_max
        )
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
