"""The callers of one run: they submit inputs, read or watch.

Inputs and reads wait in one bounded queue, in the order of their arrival, until the driver of the run handles them.
Leases in a reply that its caller no longer takes are returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rollmesh.services.coordinator.config import RunLimits
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.records import R, Request
from rollmesh.shared.clock import Clock, time_limit
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.errors import MeshError, Overloaded

T = TypeVar("T")
STATES_PER_S = 250
"""Maximum rate of states for all watchers of a run together, beyond their first ones. They get them one after the
other, so that calls pass between them."""


@dataclass(slots=True, eq=False)
class QueuedInput:
    """An input, with the ticket of the caller that waits for its reply (0: no caller waits)."""

    request: i.Input
    ticket: int = 0


@dataclass(slots=True, eq=False)
class QueuedRead:
    """A read of the core between two decisions."""

    read: Callable[[Core, LedgerHead], Any]
    answer: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class _Watched:
    """A read for one watcher or several."""

    state: asyncio.Future[Any]
    changed: asyncio.Event
    """Set by the first change that the state may lack."""
    until_s: float
    """Time from which watchers read again."""

    @property
    def is_failed(self) -> bool:
        """Whether the read raised. Its error is for the watchers that waited for it, and not for later ones."""
        return self.state.done() and (self.state.cancelled() or self.state.exception() is not None)


class Callers:
    """The callers of one run, for its driver to extend."""

    def __init__(self, run: str, core: Core, *, clock: Clock, limits: RunLimits) -> None:
        self.run = run
        self._core = core
        self._clock = clock
        self._limits = limits
        self._inputs: asyncio.Queue[QueuedInput | QueuedRead] = asyncio.Queue(limits.inputs_max)
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Any, LedgerHead]]] = {}
        self._reading: set[asyncio.Future[Any]] = set()
        self._num_watchers = 0
        self._shared: _Watched | None = None
        self._turn_s = 0.0
        """Time at which the last of the watchers with shared reads may read."""
        self._changed = asyncio.Event()
        self._closed: MeshError | None = None
        """The error for every caller once the driver is closed."""

    @property
    def idle(self) -> bool:
        """Whether no caller waits for a reply or watches. Reads are short, and some are those of housekeeping."""
        return not (self._waiting or self._num_watchers)

    async def submit(self, make: Callable[[int], Request[R]]) -> R:
        """Submit an input that is made with its ticket, and return the reply. Raises the typed refusal. A cancelled
        caller waits no longer."""
        return (await self.submit_with_head(make))[0]

    async def submit_with_head(self, make: Callable[[int], Request[R]]) -> tuple[R, LedgerHead]:
        """Submit an input. Return the reply, and the head of the ledger with its facts."""
        ticket = next(self._tickets)
        answer: asyncio.Future[tuple[R, LedgerHead]] = asyncio.get_running_loop().create_future()
        self._check_open()
        self._waiting[ticket] = answer
        try:
            self._put(QueuedInput(make(ticket), ticket))
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.return_leases(answer.result()[0])  # the reply arrived together with the cancellation
            raise
        finally:
            if self._waiting.pop(ticket, None) is not None:
                self._core.forget(ticket)

    async def enqueue(self, request: i.Input) -> None:
        """Queue an input that has no reply. Waits for room in the queue."""
        if self._closed is None:
            await self._inputs.put(QueuedInput(request))

    async def read(self, read: Callable[[Core, LedgerHead], T]) -> T:
        """Return `read(core, head of the ledger)` between two decisions, once all that it read is stored. `read` must
        not keep the core."""
        state: asyncio.Future[T] = self._queue_read(read).state
        return await state

    async def watch(
        self, read: Callable[[Core, LedgerHead], T], *, interval_s: float | None = None, is_shared: bool = False
    ) -> AsyncGenerator[T]:
        """Yield `read` now and after changes, at most every `interval_s` or else `watch_interval_s`. A slow watcher
        skips states.

        All watchers with `is_shared` must have an equivalent `read` and no `interval_s`, and must not modify what they
        get. They share a read for `watch_interval_s`. Each gets the current state at once; of later states all of them
        together get `STATES_PER_S` at most.
        """
        self._num_watchers += 1
        try:
            watched = self._share(read, is_first=True) if is_shared else self._queue_read(read)
            while True:
                yield await asyncio.shield(watched.state)
                await self._clock.sleep(self._limits.watch_interval_s if interval_s is None else interval_s)
                with contextlib.suppress(TimeoutError):
                    async with time_limit(self._clock, self._limits.watch_idle_s):
                        await watched.changed.wait()
                if is_shared:
                    now_s = self._clock.monotonic_s()
                    turn_s = max(now_s, self._turn_s + 1 / STATES_PER_S)
                    # Some that had a turn may have left.
                    self._turn_s = min(turn_s, now_s + self._num_watchers / STATES_PER_S)
                    await self._clock.sleep(self._turn_s - now_s)
                watched = self._share(read) if is_shared else self._queue_read(read)
        finally:
            self._num_watchers -= 1

    def _share(self, read: Callable[[Core, LedgerHead], Any], *, is_first: bool = False) -> _Watched:
        watched = self._shared
        if (
            watched is None
            or watched.is_failed
            or self._clock.monotonic_s() >= watched.until_s
            or (is_first and watched.changed.is_set())
        ):
            watched = self._shared = self._queue_read(read)
        return watched

    def _queue_read(self, read: Callable[[Core, LedgerHead], Any]) -> _Watched:
        """Queue a read."""
        self._check_open()
        state: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(QueuedRead(read, state))
        self._reading.add(state)
        state.add_done_callback(self._end_read)
        return _Watched(state, self._changed, self._clock.monotonic_s() + self._limits.watch_interval_s)

    def _end_read(self, state: asyncio.Future[Any]) -> None:
        self._reading.discard(state)
        if not state.cancelled():
            state.exception()  # its callers may have left

    def return_leases(self, value: object) -> None:
        """Return the leases of a reply that no worker received, at once and without counting an attempt."""
        if isinstance(value, i.Acquired) and value.leases:
            reports = tuple(
                i.EpisodeReport(
                    lease_id=lease.lease_id,
                    group=lease.group,
                    episode=lease.episode,
                    attempt=lease.attempt,
                    outcome=m.EpisodeOutcome.CANCELLED,
                    cause="the worker disconnected",
                )
                for lease in value.leases
            )
            with contextlib.suppress(asyncio.QueueFull):  # if the queue is full, they expire
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
        """Reply to every caller with `error`, except the one with the ticket `but`. Queued inputs are dropped without a
        decision."""
        waiting = [answer for ticket, answer in self._waiting.items() if ticket != but]
        for answer in [*waiting, *self._reading]:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # the caller may have left
        for _ in range(self._inputs.qsize()):
            self._inputs.get_nowait()
        self.note_change()

    def note_change(self) -> None:
        """Let the watchers read again."""
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
                f"{self._limits.inputs_max} requests wait for run {self.run}'s coordinator; retry later",
                run=self.run,
            ) from None
