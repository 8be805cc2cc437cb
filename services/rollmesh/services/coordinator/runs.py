"""The runs of a coordinator: created, recovered, found by name, and deleted.

A run is its ledger. Every run with a folder here is recovered at the start; one whose folder was lost is recovered by the first request
for it, since its streams are still on the bus. A run that has ended is led until no request has come for a while. Then it costs no task
and no state in memory, and the next request for it recovers it again.

A bug ends the run that met it: its driver stops, and the run is recovered from its ledger and ended there. A run that cannot even be
recovered answers every request with the same error until the coordinator restarts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from rollmesh.services.coordinator.config import CoordinatorConfig
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.fleet import Fleet, WeightGoal
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.core.state import State
from rollmesh.services.coordinator.driver import CAUSE_CHARS_MAX, RunDriver
from rollmesh.services.coordinator.effects import Effects, Outside
from rollmesh.services.coordinator.goals import weight_goal
from rollmesh.services.coordinator.housekeeping import Housekeeper
from rollmesh.services.coordinator.ledger import Ledger
from rollmesh.services.coordinator.recovery import Recovered, recover
from rollmesh.services.coordinator.run_storage import Ended, OpenStreams, RunStorage
from rollmesh.services.coordinator.snapshots import SnapshotStore
from rollmesh.services.coordinator.watchdog import Watchdog
from rollmesh.shared.bus.bus import StreamLog
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import DataLoss, DiskFull, Internal, MeshError, NotReady, Overloaded, RunLive, UnknownRun
from rollmesh.shared.ids import IdSource
from rollmesh.shared.ledger_head import LedgerHead
from rollmesh.shared.telemetry import log_context

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Led:
    """A run that is led here."""

    driver: RunDriver
    keeper: Housekeeper
    tasks: tuple[asyncio.Task[None], ...]
    """Housekeeping and watchdog."""
    asked_s: float
    """When the run was last asked for."""

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.driver.close()


class Runs:
    """All runs of a coordinator. `on_failure` hears of a run that can't go on."""

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
        self._bugs: dict[str, tuple[_Led, str]] = {}
        """Runs that a bug stopped, with its cause, until they are recovered."""
        self._lost: dict[str, str] = {}
        """Runs that cannot be recovered, and why."""
        self._recovering: set[asyncio.Task[None]] = set()
        self._opening = asyncio.Lock()
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def drivers(self) -> dict[str, RunDriver]:
        """The drivers of all runs that are led: the live ones, and ended ones that were asked for."""
        return {run: led.driver for run, led in self._led.items()}

    @property
    def live(self) -> list[RunDriver]:
        """The drivers of the runs that have not ended."""
        return [led.driver for led in self._led.values() if led.driver.live]

    @property
    def ended(self) -> Mapping[str, Ended]:
        """The runs that have ended and are not led."""
        return self._ended

    @property
    def changed(self) -> asyncio.Event:
        """Set, and replaced by another event, when a run becomes live or ends."""
        return self._changed

    def goals(self) -> dict[str, WeightGoal]:
        """What nodes should serve: the goals of the live runs, and without one those of the ended runs."""
        led = {run: led.driver.goal for run, led in self._led.items() if led.driver.goal is not None}
        live = {run: goal for run, goal in led.items() if not goal.ended}
        return live or led | {run: ended.goal for run, ended in self._ended.items()}

    async def recover_all(self) -> None:
        """Take up every run that has a folder here and has not ended."""
        for run in self._storage.runs():
            if (ended := self._storage.ended(run)) is not None:
                self._ended[run] = ended
                continue
            try:
                await self.get(run)
            except (DataLoss, Internal) as error:  # the answer to every request for this run; the others go on
                _log.error("run %s cannot be led: %s", run, error)
            except UnknownRun:
                _log.warning("run %s has a folder here but no ledger on this bus; it is skipped", run)

    async def create(self, spec: RunSpec) -> bool:
        """Return whether the run is new. Raises RunExists if it is there with another spec, Overloaded, and DiskFull."""
        try:
            driver = await self.get(spec.run)
        except UnknownRun:
            driver = await self._make(spec.run)
        return bool(await driver.ask(lambda ticket: i.CreateRun(ticket=ticket, spec=spec)))

    async def get(self, run: str) -> RunDriver:
        """The driver of a run, which is led from now on if it was not. Raises UnknownRun."""
        led = self._led.get(run)
        if led is None:
            async with self._opening:
                led = await self._open(run)
        led.asked_s = self._clock.monotonic_s()
        return led.driver

    async def reserve(self, run: str) -> None:
        """Give the streams of a run their full limits: a run that is changed may become live again. Raises DiskFull."""
        async with self._opening:
            await self._reserve(run)

    async def delete(self, run: str, forget: Callable[[str], Awaitable[None]]) -> None:
        """Remove an ended run, after `forget` has removed what other services keep of it.

        Raises RunLive, UnknownRun if there is nothing to remove, and what `forget` raises; then the run is still there.
        """
        async with self._opening:
            try:
                led = await self._open(run)
            except (UnknownRun, DataLoss, Internal):
                led = None  # nothing that could be live; remove what is left of it
            if led is not None:
                if await led.driver.look(lambda core, _: core.state.spec is not None and not core.state.ended):
                    raise RunLive(f"run {run} is live and cannot be deleted; StopRun it first", run=run)
                await forget(run)
                del self._led[run]
                await led.stop()
            self._ended.pop(run, None)
            if not await self._storage.delete(run):
                raise UnknownRun(f"there is no run {run!r}", run=run)

    async def retire_forever(self) -> None:
        """Stop leading runs that have ended, once no request has named them for `ended_idle_s`."""
        while True:
            await self._clock.sleep(self._config.run.ended_idle_s / 2)
            await self.retire(self._config.run.ended_idle_s)

    async def retire(self, idle_s: float) -> None:
        """Stop leading every ended run that no request has named for `idle_s`."""
        async with self._opening:
            await self._retire(idle_s)

    async def close(self) -> None:
        """Stop leading; nothing that is true is lost."""
        self._closed = True
        for task in self._recovering:
            task.cancel()
        await asyncio.gather(*self._recovering, return_exceptions=True)
        led = [*self._led.values(), *(led for led, _ in self._bugs.values())]
        self._led, self._bugs = {}, {}
        await asyncio.gather(*(one.stop() for one in led))

    # With `_opening` held ---------------------------------------------------------------------------------------------

    async def _open(self, run: str) -> _Led:
        if self._closed:
            raise NotReady("this coordinator is stopping; try again")
        if run in self._lost:
            raise Internal(self._lost[run], run=run)
        if run not in self._led:
            bug = await self._put_off(run)
            with log_context(run=run):  # also for the tasks that lead it
                self._led[run] = await self._recover(run, bug)
            self._ended.pop(run, None)
        return self._led[run]

    async def _put_off(self, run: str) -> str:
        """Stop the driver that a bug has broken; the bug's cause, empty if there was none."""
        if run not in self._bugs:
            return ""
        led, cause = self._bugs[run]
        await led.stop()
        del self._bugs[run]
        return cause

    async def _recover(self, run: str, bug: str) -> _Led:
        """Lead a run; one that a bug prevents from being led is ended, and if that fails too, it is lost to this coordinator."""
        streams = await self._storage.open(run)
        try:
            return await self._lead(run, streams, bug)
        except MeshError as error:
            if bug:
                self._lost[run] = f"run {run} could not be recovered after a bug ({bug}): {error}"
            raise
        except Exception as error:
            _log.error("run %s: a bug of the coordinator in its recovery", run, exc_info=error)
            cause = f"{type(error).__name__}: {error}"[:CAUSE_CHARS_MAX]
            if not bug:
                return await self._recover(run, cause)
            self._lost[run] = (
                f"run {run} cannot be recovered because of a bug of the coordinator ({cause}); other runs go on; do not repeat the "
                "request, report the coordinator's log, and restart the coordinator with a version that has the bug fixed"
            )
            raise Internal(self._lost[run], run=run) from error

    async def _make(self, run: str) -> RunDriver:
        async with self._opening:
            if len(self.live) >= self._config.runs_max:
                raise Overloaded(
                    f"this coordinator leads {len(self.live)} live runs, `coordinator.runs_max` is {self._config.runs_max}; "
                    "StopRun one of them, or use another mesh"
                )
            await self._reserve(run)
            try:
                return (await self._open(run)).driver
            except MeshError:
                await self._storage.delete(run)
                raise

    async def _reserve(self, run: str) -> None:
        """If the disk has no room, ended runs give theirs back first."""
        try:
            await self._storage.make(run)
        except DiskFull:
            await self._retire(0.0)
            for ended in self._ended:
                await self._storage.shrink(ended)
            await self._storage.make(run)

    async def _retire(self, idle_s: float) -> None:
        before_s = self._clock.monotonic_s() - idle_s
        for run, led in list(self._led.items()):
            if led.asked_s <= before_s and led.driver.idle and not led.driver.live:
                try:
                    await self._retire_one(run, led)
                except (MeshError, OSError) as error:
                    _log.warning("run %s has ended and keeps its storage for now: %s", run, error)

    async def _retire_one(self, run: str, led: _Led) -> None:
        ended = await led.driver.look(_how_it_ended)
        if ended is None or not led.driver.idle:
            return
        self._ended[run] = ended
        del self._led[run]  # a request that comes from now on waits, and recovers the run again
        try:
            await led.keeper.put_away()
            await self._storage.shrink(run)
        finally:
            await led.stop()
        await asyncio.to_thread(self._storage.mark_ended, run, ended)

    async def _lead(self, run: str, streams: OpenStreams, bug: str) -> _Led:
        self._storage.make_folder(run)
        self._storage.unmark_ended(run)
        store = self._storage.snapshots(run)
        recovered = await recover(streams.ledger, store)
        if recovered.state.ended:
            await self._storage.shrink(run)  # with room in its ledger again
        driver = self._make_driver(run, recovered, streams, store)
        await driver.start(bug)
        keeper = Housekeeper(
            driver,
            store,
            streams.samples,
            clock=self._clock,
            limits=self._config.run,
            position=recovered.snapshot_position,
        )
        watchdog = Watchdog(driver, self._fleet, self._clock)
        tasks = (
            asyncio.create_task(keeper.run(), name=f"{run} housekeeping"),
            asyncio.create_task(watchdog.run(), name=f"{run} watchdog"),
        )
        for task in tasks:
            task.add_done_callback(lambda task: _task_ended(task, driver))
        return _Led(driver, keeper, tasks, self._clock.monotonic_s())

    def _make_driver(self, run: str, recovered: Recovered, streams: OpenStreams, store: SnapshotStore) -> RunDriver:
        core = Core(recovered.state)

        async def restore() -> State:
            return (await recover(streams.ledger, store)).state

        ledger = Ledger(
            streams.ledger,
            head=recovered.head,
            ids=self._ids,
            clock=self._clock,
            append_s_max=self._config.run.append_s_max,
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
            on_bug=self._met_bug,
            on_live=self._live_changed,
        )

    def _effects(self, core: Core, inbox: RunDriver, dead: StreamLog) -> Effects:
        return Effects(core, inbox, self._outside, dead, clock=self._clock, ids=self._ids, limits=self._config.run)

    def _met_bug(self, driver: RunDriver, cause: str) -> None:
        """Recover the run without it; a request that comes meanwhile waits for that."""
        led = self._led.get(driver.run)
        if led is None or led.driver is not driver or self._closed:
            return
        self._bugs[driver.run] = (self._led.pop(driver.run), cause)
        task = asyncio.create_task(self._after_bug(driver.run), name=f"{driver.run} recovery")
        self._recovering.add(task)
        task.add_done_callback(self._recovering.discard)

    async def _after_bug(self, run: str) -> None:
        try:
            await self.get(run)
        except MeshError as error:
            _log.error("run %s cannot be led any more: %s", run, error)

    def _live_changed(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _how_it_ended(core: Core, head: LedgerHead) -> Ended | None:
    """None while a batch is leased: its lease has yet to end."""
    if not core.state.ended or core.volatile.batch_deadlines:
        return None
    return Ended(reason=core.state.ended, position=head.position, goal=weight_goal(core))


def _task_ended(task: asyncio.Task[None], driver: RunDriver) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        driver.broken(error)
