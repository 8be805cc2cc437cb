"""Drives one run's core: inputs in, decisions stored, effects out, all in one order.

    ask / post --> inputs --> decide: core.handle, ledger.append --> releases --> stored? --> replies, calls, commands

A decision is acted upon only when its record is stored, and no answer overtakes an earlier one: what is refused or merely read was
judged by a state that may not be stored yet. If the ledger rejects a record, the state in memory is ahead of what is true; the driver
then fails as a whole, and so does the coordinator. A record that is too large for the bus was never sent: the driver recovers the
state that is stored, and rejects the request. An exception that is not a refusal is a bug: the driver stops, the caller gets INTERNAL,
and `on_bug` recovers this run from its ledger, and ends it. The other runs go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from rollmesh.services.coordinator.config import RunLimits
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.core import Core, Decision
from rollmesh.services.coordinator.core.fleet import WeightGoal
from rollmesh.services.coordinator.core.state import State
from rollmesh.services.coordinator.core.turn import Effect, Refusal, Reply, Volatile
from rollmesh.services.coordinator.effects import Effects
from rollmesh.services.coordinator.goals import weight_goal
from rollmesh.services.coordinator.ledger import Ledger
from rollmesh.services.coordinator.metrics import APPEND_SECONDS
from rollmesh.services.coordinator.refusals import to_error
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import Internal, MeshError, NotReady, Overloaded, PayloadTooLarge
from rollmesh.shared.ledger_head import LedgerHead
from rollmesh.shared.telemetry import metrics

T = TypeVar("T")
CAUSE_CHARS_MAX = 500
CLOSE_S_MAX = 5.0
"""Longest wait, when closing, for records on their way."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Question:
    """An input, with whoever waits for its answer (`ticket` 0: nobody)."""

    request: i.Input
    ticket: int = 0


@dataclass(slots=True, eq=False)
class _Look:
    """A read of the core between two decisions."""

    read: Callable[[Core, LedgerHead], Any]
    answer: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class _Release:
    """What follows once everything before it is stored."""

    head: LedgerHead
    stored: asyncio.Future[int] | None = None
    effects: tuple[Effect, ...] = ()
    goal: WeightGoal | None = None
    act: Callable[[], None] | None = None


class RunDriver:
    """One run of this coordinator. `start` it after recovery."""

    def __init__(
        self,
        run: str,
        core: Core,
        ledger: Ledger,
        make_effects: Callable[[RunDriver], Effects],
        *,
        clock: Clock,
        limits: RunLimits,
        restore: Callable[[], Awaitable[State]],
        on_failure: Callable[[str, MeshError], None],
        on_bug: Callable[[RunDriver, str], None],
        on_live: Callable[[], None] = lambda: None,
    ) -> None:
        """`restore` recovers the stored state; `on_bug` gets the cause once this driver has stopped; `on_live` is called when the run
        becomes live, and when it has ended."""
        self.run = run
        self.goal: WeightGoal | None = None
        """What the nodes of this run should serve, as far as stored."""
        self.purged_below = 0
        """Payloads below this sequence of the sample stream are gone, or about to be."""
        self._core = core
        self._ledger = ledger
        self._clock = clock
        self._limits = limits
        self._restore = restore
        self._on_failure = on_failure
        self._on_bug = on_bug
        self._deciding: _Question | None = None
        """The question that is decided on, or that met a bug."""
        self._on_live = on_live
        self._inputs: asyncio.Queue[_Question | _Look] = asyncio.Queue(limits.inputs_max)
        self._releases: asyncio.Queue[_Release] = asyncio.Queue(limits.releases_max)
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[object, LedgerHead]]] = {}
        self._last_stored: asyncio.Future[int] | None = None
        self._looking: set[asyncio.Future[Any]] = set()
        self._num_watchers = 0
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._closed: MeshError | None = None
        self._effects = make_effects(self)

    @property
    def live(self) -> bool:
        """Whether the run was created and has not ended, as far as stored."""
        return self.goal is not None and not self.goal.ended

    @property
    def idle(self) -> bool:
        """Whether no caller waits for an answer or watches. Looks are short, and some are housekeeping's."""
        return not (self._waiting or self._num_watchers)

    @property
    def trouble(self) -> str:
        """Why groups could not be finalised the last time."""
        return self._effects.trouble

    # From outside -----------------------------------------------------------------------------------------------------

    async def start(self, bug: str = "") -> None:
        """Begin: leases get their grace and open questions are asked again. With `bug`, its cause, the run is ended first."""
        if bug:
            await self._releases.put(await self._record(self._core.fail(bug, self._clock.monotonic_s())))
        decision = self._core.resume(self._clock.monotonic_s())
        await self._releases.put(await self._record(decision))
        loops = {"decide": self._decide_forever, "release": self._release_forever, "tick": self._tick_forever}
        self._tasks = [asyncio.create_task(self._guarded(loop), name=f"{self.run} {k}") for k, loop in loops.items()]

    async def ask(self, make: Callable[[int], i.Input]) -> Any:
        """The answer to an input made with its ticket. Raises the typed refusal; if cancelled, nobody waits any longer."""
        return (await self.ask_placed(make))[0]

    async def ask_placed(self, make: Callable[[int], i.Input]) -> tuple[Any, LedgerHead]:
        """As `ask`, with the head of the ledger at which the answer became true."""
        ticket = next(self._tickets)
        answer: asyncio.Future[tuple[object, LedgerHead]] = asyncio.get_running_loop().create_future()
        self._check_open()
        self._waiting[ticket] = answer
        try:
            self._put(_Question(make(ticket), ticket))
            return await answer
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self.give_back(answer.result()[0])  # it came together with the cancellation
            raise
        finally:
            if self._waiting.pop(ticket, None) is not None:
                self._core.forget(ticket)

    async def post(self, request: i.Input) -> None:
        """An input without an answer; waits for room."""
        if self._closed is None:
            await self._inputs.put(_Question(request))

    async def look(self, read: Callable[[Core, LedgerHead], T]) -> T:
        """`read(core, head of the ledger)` between two decisions, once all it saw is stored. `read` must not keep the core."""
        self._check_open()
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._looking.add(answer)
        answer.add_done_callback(self._looking.discard)
        self._put(_Look(read, answer))
        return await answer

    async def watch(self, read: Callable[[Core, LedgerHead], T]) -> AsyncIterator[T]:
        """`look(read)` now and after changes, at most every `watch_interval_s`; a slow watcher skips states."""
        self._num_watchers += 1
        try:
            while True:
                changed = self._changed
                yield await self.look(read)
                await self._clock.sleep(self._limits.watch_interval_s)
                await self._idle(changed)
        finally:
            self._num_watchers -= 1

    def broken(self, error: BaseException) -> None:
        """Stop because of a bug, in the core or beside it: what is in memory may not be what is true."""
        if self._closed is not None:
            return
        _log.error("run %s: a bug of the coordinator", self.run, exc_info=error)
        cause = f"{type(error).__name__}: {error}"[:CAUSE_CHARS_MAX]
        if (asked := self._deciding) is not None:
            answer = self._waiting.pop(asked.ticket, None)
            if answer is not None and not answer.done():
                answer.set_exception(_internal(self.run, type(asked.request).__name__, cause, "the run has ended"))
        self._stop(NotReady(f"run {self.run} is recovered from its ledger; try again"))
        self._on_bug(self, cause)

    async def close(self) -> None:
        """Stop deciding; who waits is told to try again. Waits for records on their way, so that no successor is fenced by them."""
        self._shut(NotReady(f"the coordinator of run {self.run} is stopping; try again"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._effects.close()
        if self._last_stored is not None:
            await asyncio.wait([self._last_stored], timeout=CLOSE_S_MAX)

    def give_back(self, value: object) -> None:
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
                self._inputs.put_nowait(_Question(i.ReportEpisodes(ticket=0, node_id="", reports=reports)))

    # Deciding ---------------------------------------------------------------------------------------------------------

    async def _decide_forever(self) -> None:
        while True:
            item = await self._inputs.get()
            if isinstance(item, _Look):
                release = self._look(item)
            else:
                self._deciding = item
                release = await self._decide(item)
                self._deciding = None
            await self._releases.put(release)

    async def _decide(self, question: _Question) -> _Release:
        request = question.request
        if isinstance(request, i.ReportEpisodes):
            request = without_purged(request, self.purged_below)
        try:
            decision = self._core.handle(request, self._clock.monotonic_s())
        except Refusal as refusal:
            error, head = to_error(refusal), self._ledger.head
            return _Release(head, act=lambda: self._answer(question.ticket, error, head))
        if question.ticket and question.ticket not in self._waiting:
            self._core.forget(question.ticket)  # cancelled while it was queued
        try:
            return await self._record(decision)
        except PayloadTooLarge as error:
            if not question.ticket:
                raise self._ledger.failure(error) from error
            return await self._undo(question.ticket, error)

    async def _undo(self, ticket: int, error: PayloadTooLarge) -> _Release:
        """Go back to the stored state, as after a restart, since a decision cannot be stored. Its request is rejected; one that
        waits within the core has to be repeated."""
        _log.warning("run %s: a request was rejected, its record is too large: %s", self.run, error)
        performed = asyncio.Event()
        await self._releases.put(_Release(self._ledger.head, act=performed.set))
        await performed.wait()
        await self._effects.close()  # what they would bring answers questions of the state that is dropped
        lost = set(self._waiting) - {ticket}
        for _ in range(self._inputs.qsize()):
            item = self._inputs.get_nowait()
            if isinstance(item, _Look) or item.ticket:
                self._inputs.put_nowait(item)
                lost -= {item.ticket} if isinstance(item, _Question) else set()
        self._core.state, self._core.volatile = await self._restore(), Volatile()
        release = await self._record(self._core.resume(self._clock.monotonic_s()))

        def act() -> None:
            self._answer(ticket, error, release.head)
            for one in lost:
                self._answer(one, NotReady(f"run {self.run} was recovered; try again", run=self.run), release.head)

        return replace(release, act=act)

    async def _record(self, decision: Decision) -> _Release:
        stored = None
        if decision.facts:
            try:
                stored = self._last_stored = await self._ledger.append(decision.facts)
                self._time_append(stored)
            except PayloadTooLarge:
                raise
            except MeshError as error:
                raise self._ledger.failure(error) from error
        goal = weight_goal(self._core) if self._core.state.spec is not None else None
        return _Release(self._ledger.head, stored, decision.effects, goal)

    def _time_append(self, stored: asyncio.Future[int]) -> None:
        if metrics.is_on():
            asked_s = self._clock.monotonic_s()
            stored.add_done_callback(
                lambda _: metrics.observe(APPEND_SECONDS, self._clock.monotonic_s() - asked_s, self.run)
            )

    def _look(self, item: _Look) -> _Release:
        """A read that fails fails its own call alone: it has decided nothing."""
        value, error = None, None
        try:
            value = item.read(self._core, self._ledger.head)
        except MeshError as refused:
            error = refused
        except Exception as bug:  # noqa: BLE001 (the recording point for bugs of what reads the core)
            _log.error("run %s: its state cannot be read", self.run, exc_info=bug)
            error = _internal(self.run, "a read of its state", f"{type(bug).__name__}: {bug}", "nothing has changed")

        def act() -> None:
            if item.answer.done():
                return
            if error is not None:
                item.answer.set_exception(error)
            else:
                item.answer.set_result(value)

        return _Release(self._ledger.head, act=act)

    async def _tick_forever(self) -> None:
        while True:
            await self._clock.sleep(self._limits.tick_s)
            deadline = self._core.next_deadline()
            if deadline is not None and deadline <= self._clock.monotonic_s():
                await self.post(i.Tick())

    # Releasing --------------------------------------------------------------------------------------------------------

    async def _release_forever(self) -> None:
        while True:
            release = await self._releases.get()
            if release.stored is not None:
                try:
                    await release.stored
                except MeshError as error:
                    raise self._ledger.failure(error) from error
            self._release(release)

    def _release(self, release: _Release) -> None:
        if release.goal is not None:
            was_live, self.goal = self.live, release.goal
            if self.live is not was_live:
                self._on_live()
        for effect in release.effects:
            if isinstance(effect, Reply):
                self._answer(effect.ticket, effect.value, release.head)
            else:
                self._effects.perform(effect, release.head.position)
        if release.act is not None:
            release.act()
        if release.stored is not None:
            self._changed.set()
            self._changed = asyncio.Event()

    def _answer(self, ticket: int, value: object, head: LedgerHead) -> None:
        answer = self._waiting.pop(ticket, None)
        if answer is None or answer.done():
            self.give_back(value)
        elif isinstance(value, MeshError):
            answer.set_exception(value)
        else:
            answer.set_result((value, head))

    # Ending -----------------------------------------------------------------------------------------------------------

    async def _guarded(self, loop: Callable[[], Any]) -> None:
        try:
            await loop()
        except MeshError as error:
            if self._closed is None:
                self._stop(
                    NotReady(f"the coordinator of run {self.run} has stopped; try again at the one that leads it now")
                )
                self._on_failure(self.run, error)
        except Exception as error:  # noqa: BLE001 (the one recording point for bugs of the core)
            bug = error
            if loop == self._decide_forever:  # what was decided before is stored and answered first
                await self._releases.put(_Release(self._ledger.head, act=lambda: self.broken(bug)))
            else:
                self.broken(bug)

    def _stop(self, error: MeshError) -> None:
        """Tell every caller `error`, and end all work."""
        self._shut(error)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._effects.cancel()

    def _shut(self, error: MeshError) -> None:
        self._closed = self._closed or error
        self._changed.set()
        for answer in [*self._waiting.values(), *self._looking]:
            if not answer.done():
                answer.set_exception(error)
                answer.exception()  # whoever asked may be gone

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def _put(self, item: _Question | _Look) -> None:
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


def _internal(run: str, what: str, cause: str, since: str) -> Internal:
    return Internal(
        f"run {run}: {what} failed because of a bug of the coordinator ({cause[:CAUSE_CHARS_MAX]}): {since}; do not repeat the "
        "request, and report the coordinator's log",
        run=run,
    )


def without_purged(request: i.ReportEpisodes, purged_below: int) -> i.ReportEpisodes:
    """The same reports, but those whose payload came so long ago that it was purged name no try: the core answers UNKNOWN_LEASE."""
    if not any(0 < report.payload.sequence < purged_below for report in request.reports):
        return request
    reports = (replace(r, attempt=-1) if 0 < r.payload.sequence < purged_below else r for r in request.reports)
    return replace(request, reports=tuple(reports))
