"""The runs of a coordinator: made, recovered and found by name.

A run is its ledger. Every run with a folder here is recovered at the start; one whose folder was lost is recovered when it is first
asked for, since its streams are still on the bus.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollmesh.services.coordinator.config import CoordinatorConfig
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.fleet import Fleet
from rollmesh.services.coordinator.core.records import RunSpec
from rollmesh.services.coordinator.driver import RunDriver
from rollmesh.services.coordinator.effects import Effects, Outside
from rollmesh.services.coordinator.housekeeping import Housekeeper
from rollmesh.services.coordinator.ledger import Ledger
from rollmesh.services.coordinator.recovery import Recovered, recover
from rollmesh.services.coordinator.snapshots import SnapshotStore
from rollmesh.services.coordinator.watchdog import Watchdog
from rollmesh.shared.bus.bus import Bus, StreamLog, UnknownStream
from rollmesh.shared.bus.run_streams import RunStreams, run_streams
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import DataLoss, InvalidInput, MeshError, NotReady, Overloaded, UnknownRun
from rollmesh.shared.ids import IdSource
from rollmesh.shared.telemetry import log_context

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Led:
    """A run that is led here."""

    driver: RunDriver
    tasks: tuple[asyncio.Task[None], ...]
    """Housekeeping and watchdog."""


class Runs:
    """All runs of a coordinator. `on_failure` hears of a run that can't go on."""

    def __init__(
        self,
        bus: Bus,
        folder: Path,
        outside: Outside,
        fleet: Fleet,
        *,
        clock: Clock,
        ids: IdSource,
        config: CoordinatorConfig,
        on_failure: Callable[[str, MeshError], None],
    ) -> None:
        self._bus = bus
        self._folder = folder
        self._outside = outside
        self._fleet = fleet
        self._clock = clock
        self._ids = ids
        self._config = config
        self._on_failure = on_failure
        self._led: dict[str, _Led] = {}
        self._opening = asyncio.Lock()
        self._closed = False

    @property
    def drivers(self) -> dict[str, RunDriver]:
        return {run: led.driver for run, led in self._led.items()}

    async def recover_all(self) -> None:
        """Take up every run that has a folder here."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self._folder.iterdir()):
            if path.is_dir():
                try:
                    await self.get(path.name)
                except DataLoss as error:  # told to whoever asks for this run; the others go on
                    _log.error("run %s cannot be led: %s", path.name, error)
                except UnknownRun:
                    _log.warning(
                        "run %s has a folder in %s but no ledger on this bus; it is passed by", path.name, self._folder
                    )

    async def create(self, spec: RunSpec) -> bool:
        """Whether the run is new. Raises RunExists if it is there with another spec."""
        driver = await self._open(spec.run, make=True)
        return bool(await driver.ask(lambda ticket: i.CreateRun(ticket=ticket, spec=spec)))

    async def get(self, run: str) -> RunDriver:
        """The driver of a run. Raises UnknownRun."""
        led = self._led.get(run)
        return led.driver if led is not None else await self._open(run, make=False)

    async def close(self) -> None:
        """Stop leading; nothing that is true is lost."""
        self._closed = True
        led, self._led = self._led, {}
        tasks = [task for one in led.values() for task in one.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(one.driver.close() for one in led.values()))

    async def _open(self, run: str, *, make: bool) -> RunDriver:
        async with self._opening:
            if self._closed:
                raise NotReady("this coordinator is stopping; try again")
            if run in self._led:
                return self._led[run].driver
            if len(self._led) >= self._config.runs_max:
                raise Overloaded(f"this coordinator leads runs_max = {self._config.runs_max} runs; use another one")
            specs = _stream_specs(run, self._config, make=make)
            if make:
                for spec in (specs.samples, specs.ledger, specs.events, specs.dead):
                    await self._bus.create(spec)
            with log_context(run=run):  # also for the tasks that lead it
                self._led[run] = await self._lead(run, specs)
            return self._led[run].driver

    async def _lead(self, run: str, specs: RunStreams) -> _Led:
        try:
            ledger, samples, dead = [await self._bus.open(s.name) for s in (specs.ledger, specs.samples, specs.dead)]
        except UnknownStream as error:
            raise UnknownRun(f"there is no run {run!r}; CreateRun first", run=run) from error
        store = SnapshotStore(self._folder / run)
        recovered = await recover(ledger, store)
        driver = self._make_driver(run, recovered, ledger, dead)
        await driver.start()
        (self._folder / run).mkdir(parents=True, exist_ok=True)
        keeper = Housekeeper(
            driver, store, samples, clock=self._clock, limits=self._config.run, position=recovered.snapshot_position
        )
        watchdog = Watchdog(driver, self._fleet, self._clock)
        tasks = (
            asyncio.create_task(keeper.run(), name=f"{run} housekeeping"),
            asyncio.create_task(watchdog.run(), name=f"{run} watchdog"),
        )
        for task in tasks:
            task.add_done_callback(lambda task: _ended(task, driver))
        return _Led(driver, tasks)

    def _make_driver(self, run: str, recovered: Recovered, log: StreamLog, dead: StreamLog) -> RunDriver:
        core = Core(recovered.state)
        ledger = Ledger(
            log,
            position=recovered.position,
            record_id=recovered.record_id,
            ids=self._ids,
            clock=self._clock,
            append_s_max=self._config.run.append_s_max,
        )
        return RunDriver(
            run,
            core,
            ledger,
            lambda inbox: self._effects(core, inbox, dead),
            clock=self._clock,
            limits=self._config.run,
            on_failure=self._on_failure,
        )

    def _effects(self, core: Core, inbox: RunDriver, dead: StreamLog) -> Effects:
        return Effects(core, inbox, self._outside, dead, clock=self._clock, ids=self._ids, limits=self._config.run)


def _ended(task: asyncio.Task[None], driver: RunDriver) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        driver.broken(error)


def _stream_specs(run: str, config: CoordinatorConfig, *, make: bool) -> RunStreams:
    try:
        return run_streams(run, config.streams)
    except InvalidInput as error:
        if make:
            raise
        raise UnknownRun(f"there is no run {run!r}: {error}", run=run) from error
