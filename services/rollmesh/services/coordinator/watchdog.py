"""The watchdog of one run: no progress for `stall_s` becomes one recorded event with its cause.

Progress is a fact of `core.apply.PROGRESS`. The wait chain is read between two decisions, from the core's waiting
callers and the fleet's reports. The core decides whether the run is stalled, so that a run with progress in the
meantime is not affected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.services.coordinator.core.fleet import Fleet
from rollmesh.services.coordinator.core.waits import Wait, chain, to_text
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.errors import MeshError

T = TypeVar("T")
LOOK_S = 1.0
"""Time between two checks, in seconds: the maximum delay in noticing a stall."""
_log = logging.getLogger(__name__)


class WatchedRun(Protocol):
    """The methods of a run's driver that the watchdog uses."""

    run: str

    @property
    def last_error(self) -> str: ...

    async def enqueue(self, request: i.Input) -> None: ...

    async def read(self, read: Callable[[Core, LedgerHead], Any]) -> Any: ...


class Watchdog:
    """Watches one run."""

    def __init__(self, run: WatchedRun, fleet: Fleet, clock: Clock) -> None:
        self._run = run
        self._fleet = fleet
        self._clock = clock
        self._reported = ""

    async def run(self) -> None:
        """Check periodically."""
        while True:
            await self._clock.sleep(LOOK_S)
            try:
                await self.check()
            except MeshError as error:  # the driver is ending, or overloaded; the next check reports it
                _log.debug("watchdog of run %s: %s", self._run.run, error)

    async def check(self) -> None:
        """Check once, and report a stall to the core."""
        links = await self._run.read(self._if_stalled)
        if not links:
            self._reported = ""
            return
        cause = to_text(links)
        if not self._reported:
            _log.warning("run stalled: run=%s: %s", self._run.run, cause)
        if cause != self._reported:
            self._reported = cause
            await self._run.enqueue(i.Stalled(root=links[-1].who, cause=cause))

    def _if_stalled(self, core: Core, _: LedgerHead) -> list[Wait]:
        if core.state.spec is None or not core.is_stalled(self._clock.monotonic_s()):
            return []
        return read_chain(core, self._fleet, self._clock, self._run.last_error) or [
            Wait("run", "waits for an unknown component")
        ]


def read_chain(core: Core, fleet: Fleet, clock: Clock, last_error: str) -> list[Wait]:
    """Return the current wait chain of a run."""
    return chain(DecisionContext(core.state, core.ephemeral, clock.monotonic_s()), fleet, last_error)
