"""The callers of one run: those who ask, look or watch, from their question to its answer.

Questions wait in one bounded queue in the order in which they came, which the driver of the run takes them from. An answer that its
caller no longer takes is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from rollmesh.services.coordinator.config import RunLimits
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.core import Core
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import MeshError, Overloaded
from rollmesh.shared.ledger_head import LedgerHead

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class QueuedInput:
    """An input, with the ticket of the caller that waits for its answer (0: none does)."""

    request: i.Input
    ticket: int = 0


@dataclass(slots=True, eq=False)
class QueuedRead:
    """A read of the core between two decisions."""

    read: Callable[[Core, LedgerHead], Any]
    answer: asyncio.Future[Any]


class Callers:
    """The callers of one run, for its driver to extend."""

    def __init__(self, run: str, core: Core, *, clock: Clock, limits: RunLimits) -> None:
        self.run = run
        self._core = core
        self._clock = clock
        self._limits = limits
        self._inputs: asyncio.Queue[QueuedInput | QueuedRead] = asyncio.Queue(limits.inputs_max)
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[object, LedgerHead]]] = {}
        self._reading: set[asyncio.Future[Any]] = set()
        self._num_watchers = 0
        self._changed = asyncio.Event()
        self._closed: MeshError | None = None
        """What callers get once no question is answered any more."""

    @property
    def idle(self) -> bool:
        """Whether no caller waits for an answer or watches. Looks are short, and some are housekeeping's."""
        return not (self._waiting or self._num_watchers)

    async def submit(self, make: Callable[[int], i.Input]) -> Any:
        """The answer to an input made with its ticket. Raises the typed refusal; if cancelled, nobody waits any longer."""
        return (await self.submit_with_head(make))[0]

    async def submit_with_head(self, make: Callable[[int], i.Input]) -> tuple[Any, LedgerHead]:
        """As `ask`, with the head of the ledger at which the answer became true."""
        ticket = next(self._tickets)
        answer: asyncio.Future[tuple[object, LedgerHead]] = asyncio.get_running_loop().create_future()
        self._check_open()
        self._waiting[ticket] = answer
        try:
            self._put(QueuedInput(make(ticket), ticket))
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.return_leases(answer.result()[0])  # it came together with the cancellation
            raise
        finally:
            if self._waiting.pop(ticket, None) is not None:
                self._core.forget(ticket)

    async def enqueue(self, request: i.Input) -> None:
        """An input without an answer; waits for room."""
        if self._closed is None:
            await self._inputs.put(QueuedInput(request))

    async def read(self, read: Callable[[Core, LedgerHead], T]) -> T:
        """`read(core, head of the ledger)` between two decisions, once all it saw is stored. `read` must not keep the core."""
        self._check_open()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._reading.add(answer)
        answer.add_done_callback(self._reading.discard)
        self._put(QueuedRead(read, answer))
        return await answer

    async def watch(self, read: Callable[[Core, LedgerHead], T]) -> AsyncIterator[T]:
        """`look(read)` now and after changes, at most every `watch_interval_s`; a slow watcher skips states."""
        self._num_watchers += 1
        try:
            while True:
                changed = self._changed
                yield await self.read(read)
                await self._clock.sleep(self._limits.watch_interval_s)
                await self._idle(changed)
        finally:
            self._num_watchers -= 1

    def return_leases(self, value: object) -> None:
        """Return the leases of an answer that no worker got, at once and without costing an attempt."""
        if isinstance(value, i.Acquired) and value.leases:
            reports = tuple(
                i.EpisodeReport(
                    lease_id=lease.lease_id,
                    group=lease.group,
                    episode=lease.episode,
                    attempt=lease.attempt,
                    outcome=i.EpisodeOutcome.CANCELLED,
                    cause="the worker hung up",
                )
                for lease in value.leases
            )
            with contextlib.suppress(asyncio.QueueFull):  # then they expire
                self._inputs.put_nowait(QueuedInput(i.ReportEpisodes(ticket=0, node_id="", reports=reports)))

    def _answer(self, ticket: int, value: object, head: LedgerHead) -> None:
        answer = self._waiting.pop(ticket, None)
        if answer is None or answer.done():
            self.return_leases(value)
        elif isinstance(value, MeshError):
            answer.set_exception(value)
        else:
            answer.set_result((value, head))

    def _reject_all(self, error: MeshError, but: int = 0) -> None:
        """Answer every caller with `error`, except the one with the ticket `but`. What waits in the queue is not decided."""
        waiting = [answer for ticket, answer in self._waiting.items() if ticket != but]
        for answer in [*waiting, *self._reading]:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # the caller may have left
        for _ in range(self._inputs.qsize()):
            self._inputs.get_nowait()
        self._note_change()

    def _note_change(self) -> None:
        """Let the watchers look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def _put(self, item: QueuedInput | QueuedRead) -> None:
        try:
            self._inputs.put_nowait(item)
        except asyncio.QueueFull:
            raise Overloaded(
                f"{self._limits.inputs_max} questions wait for run {self.run}'s coordinator; try again later",
                run=self.run,
            ) from None

    async def _idle(self, changed: asyncio.Event) -> None:
        """Until something changed, or `watch_idle_s` is over."""
        waits = [
            asyncio.ensure_future(changed.wait()),
            asyncio.ensure_future(self._clock.sleep(self._limits.watch_idle_s)),
        ]
        try:
            await asyncio.wait(cast("list[asyncio.Future[Any]]", waits), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
