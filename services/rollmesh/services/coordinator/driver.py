"""Drives the core of one run: inputs in, decisions stored, effects out, all in one order.

    submit / enqueue --> inputs --> decide: core.handle, ledger.append --> releases --> stored? --> replies, calls,
    commands

The driver releases the effects of a decision only when its record is stored, and no reply overtakes an earlier one: a
refusal or a read depends on state that may not be stored yet. If the ledger rejects a record, the driver fails as a
whole, and so does the coordinator.

If only the state in memory is wrong, the driver recovers once every earlier decision is stored and answered: it
restores the stored state, resumes, and callers repeat unanswered requests. There are two such cases. A record that is
too large for the bus was never sent: its request is rejected. An exception that is not a refusal is a bug: its caller
gets INTERNAL, and the run ends before it resumes. In a third case the ledger has no room for a record: the run ends in
the room that `restore` makes for it. A run that cannot be recovered, or cannot store a record that no caller asked for,
is lost to this coordinator (`on_lost`). Other runs are not affected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from msgspec import structs

from rollmesh.services.coordinator.callers import Callers, QueuedInput, QueuedRead
from rollmesh.services.coordinator.config import RunLimits
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.core import Core, Decision
from rollmesh.services.coordinator.core.decision_context import Effect, EphemeralState, Reply
from rollmesh.services.coordinator.core.ending import LEDGER_FULL
from rollmesh.services.coordinator.core.fleet import WeightGoal
from rollmesh.services.coordinator.effects import Effects
from rollmesh.services.coordinator.ledger import Ledger
from rollmesh.services.coordinator.metrics import APPEND_SECONDS
from rollmesh.services.coordinator.recovery import Recovered
from rollmesh.shared.bus.bus import StreamFull
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.errors import DataLoss, Internal, LedgerFull, MeshError, NotReady, PayloadTooLarge
from rollmesh.shared.store.payload_files import file_of, in_file
from rollmesh.shared.telemetry import metrics

CAUSE_CHARS_MAX = 500
LEDGER_WARN_SHARE = 0.8
"""Share of a ledger's limit from which a live run logs a warning and takes no further submitted tasks."""
CLOSE_S_MAX = 5.0
"""Maximum time to wait for appends in progress when closing or recovering, in seconds."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Release:
    """What to do once every earlier record is stored."""

    head: LedgerHead
    stored: asyncio.Future[int] | None = None
    effects: tuple[Effect, ...] = ()
    goal: WeightGoal | None = None
    act: Callable[[], None] | None = None


class RunDriver(Callers):
    """One run of this coordinator, from `start` to `close`."""

    def __init__(
        self,
        run: str,
        core: Core,
        ledger: Ledger,
        make_effects: Callable[[RunDriver], Effects],
        *,
        clock: Clock,
        limits: RunLimits,
        restore: Callable[[bool], Awaitable[Recovered]],
        on_failure: Callable[[str, MeshError], None],
        on_lost: Callable[[RunDriver, Internal], None],
        on_live: Callable[[], None] = lambda: None,
    ) -> None:
        """`restore` reads the stored state; its argument says whether the run will end, and needs room for that in its
        ledger. `on_lost` is called with the cause when the run cannot be recovered and
        this driver has stopped. `on_live` is called when the run becomes live, and when it has ended."""
        super().__init__(run, core, clock=clock, limits=limits)
        self.weight_goal: WeightGoal | None = None
        """What the nodes of this run should serve, by the stored state."""
        self.purged_below = 0
        """Payloads below this sequence of the sample stream are purged, or will be."""
        self.purged_files: set[int] = set()
        """Numbers of the payload files that are removed, or will be."""
        self._ledger = ledger
        self._restore = restore
        self._on_failure = on_failure
        self._on_lost = on_lost
        self._on_live = on_live
        self._deciding: QueuedInput | None = None
        """The input that is being decided, or whose decision must be dropped."""
        self._releases: asyncio.Queue[_Release] = asyncio.Queue(limits.releases_max)
        self._last_stored: asyncio.Future[int] | None = None
        self._recovering = False
        self._full = False
        """Whether the ledger had no room for a record, and has stored none since."""
        self._warned = False
        """Whether it was logged that the ledger is nearly full."""
        self._tasks: list[asyncio.Task[None]] = []
        """The loops, or the recovery."""
        self._effects = make_effects(self)

    @property
    def live(self) -> bool:
        """Whether the run was created and has not ended, by the stored state."""
        return self.weight_goal is not None and not self.weight_goal.ended

    @property
    def ledger_used(self) -> float:
        """Share of the ledger's limit that is used."""
        return self._ledger.used

    async def measure_ledger(self) -> None:
        """Use the size and the limit that the ledger's stream has now."""
        await self._ledger.measure()

    @property
    def last_error(self) -> str:
        """The last error of a finalization."""
        return self._effects.last_error

    async def start(self) -> Recovered:
        """Start with the stored state, and return it. Raises Internal if a bug prevents that."""
        return await self._begin()

    async def close(self) -> None:
        """Stop. Pending callers get UNAVAILABLE. Waits for appends in progress, so that they do not fence a
        successor."""
        self._shut(NotReady(f"the coordinator of run {self.run} is stopping; retry later"))
        await self._end_work()

    # Recovering -------------------------------------------------------------------------------------------------------

    async def _begin(self, bug: str = "", full: str = "") -> Recovered:
        """Restore the stored state, renew leases and repeat open requests. With the cause of a `bug`, or of a `full`
        ledger, end the run first. Either of them in this method ends the run too, but only once."""
        try:
            recovered = await self._restore(bool(bug or full))
            await self._ledger.begin(recovered.head)
            self._core.state, self._core.ephemeral = recovered.state, EphemeralState()
            now = self._clock.monotonic_s()
            ended = self._core.fail(bug, now) if bug else self._core.end(full, now) if full else Decision((), ())
            resumed = self._core.resume(now)
            release = await self._record(Decision(ended.facts + resumed.facts, ended.effects + resumed.effects))
        except LedgerFull as error:
            if bug or full or recovered.state.ended:
                raise
            _log.warning("run %s: %s", self.run, error)
            return await self._begin(full=self._end_reason())
        except PayloadTooLarge as error:
            raise self._ledger.failure(error) from error
        except MeshError:
            raise
        except Exception as error:  # the recording point for bugs that prevent a recovery
            cause = self._log_bug(error)
            if not bug:
                return await self._begin(cause)
            raise Internal(
                f"run {self.run} cannot be recovered because of a bug of the coordinator ({cause}); other runs are not "
                "affected; do not repeat the request, report the coordinator's log, and restart the coordinator with a "
                "version that has the bug fixed",
                run=self.run,
            ) from error
        await self._releases.put(release)
        self._recovering = False
        loops = {"decide": self._decide_forever, "release": self._release_forever, "tick": self._tick_forever}
        self._tasks = [asyncio.create_task(self._guarded(loop), name=f"{self.run} {k}") for k, loop in loops.items()]
        return recovered

    def recover_from(self, error: BaseException) -> None:
        """Recover because of a bug outside the core: the state in memory may be wrong."""
        self._go_back(error, None)

    def _go_back(self, error: BaseException, asked: QueuedInput | None) -> None:
        """Recover, because the state in memory must be dropped. `asked` is the input at fault."""
        if self._closed is not None or self._recovering:
            return
        answer: MeshError
        ticket, what = (asked.ticket, type(asked.request).__name__) if asked is not None else (0, "a call")
        bug = full = ""
        if isinstance(error, (PayloadTooLarge, LedgerFull, StreamFull)):
            is_full, self._full = self._full, not isinstance(error, PayloadTooLarge)
            if not ticket and (is_full or not self._full):
                self._lose(self._ledger.failure(error))  # no caller can get it, and a recovery would repeat it
                return
            _log.warning("run %s: a record was not stored: %s", self.run, error)
            answer = error
            if self._full and (self.live or not ticket):
                ticket, full = 0, self._end_reason()
        else:
            bug = self._log_bug(error)
            answer = _internal(self.run, what, bug, "the run has ended")
        self._recovering = True
        self._tasks.append(asyncio.create_task(self._recover(bug, full, ticket, answer), name=f"{self.run} recovery"))

    async def _recover(self, bug: str, full: str, ticket: int, answer: MeshError) -> None:
        """Recover. The caller with `ticket` gets `answer`; all others get UNAVAILABLE."""
        await self._end_work()  # results of effects belong to the state that is dropped
        self._reject_all(NotReady(f"run {self.run} is recovered from its ledger; retry", run=self.run), but=ticket)
        self._releases = asyncio.Queue(self._limits.releases_max)
        try:
            await self._begin(bug, full)
        except MeshError as error:
            after = f" after a bug ({bug})" if bug else ""
            self._lose(error, f"run {self.run} could not be recovered{after}: ")
        else:
            self._answer(ticket, answer, self._ledger.head)

    def _lose(self, error: MeshError, what: str = "") -> None:
        """Stop. Every request for the run gets the error from now on."""
        lost = error if isinstance(error, Internal) else Internal(f"{what}{error}", run=self.run)
        self._stop(lost)
        self._on_lost(self, lost)

    def _end_reason(self) -> str:
        return f"{LEDGER_FULL}: {self._ledger.full}"

    def _log_bug(self, error: BaseException) -> str:
        _log.error("run %s: a bug of the coordinator", self.run, exc_info=error)
        return f"{type(error).__name__}: {error}"[:CAUSE_CHARS_MAX]

    # Deciding ---------------------------------------------------------------------------------------------------------

    async def _decide_forever(self) -> None:
        while True:
            item = await self._inputs.get()
            if isinstance(item, QueuedRead):
                release = self._read(item)
            else:
                self._deciding = item
                release = await self._decide(item)
                self._deciding = None
            await self._releases.put(release)

    async def _decide(self, question: QueuedInput) -> _Release:
        request = question.request
        if isinstance(request, i.ReportEpisodes):
            request = without_purged(request, self._is_purged)
        elif isinstance(request, i.SubmitTasks | i.SubmitSamples):
            position = self._ledger.head.position + 1
            left = int(self._ledger.left(LEDGER_WARN_SHARE))
            request = structs.replace(
                request,
                submission=f"{position}-{request.submission}",
                limits=replace(request.limits, ledger_bytes_left=left),
            )
        try:
            decision = self._core.handle(request, self._clock.monotonic_s())
        except MeshError as error:
            refusal, head = error.with_traceback(None), self._ledger.head
            return _Release(head, act=lambda: self._answer(question.ticket, refusal, head))
        if question.ticket and question.ticket not in self._waiting:
            self._core.forget(question.ticket)  # cancelled while it was queued
        return await self._record(decision)

    async def _record(self, decision: Decision) -> _Release:
        """Append the record of a decision. Raises PayloadTooLarge and LedgerFull for a record that was not sent."""
        stored = None
        if decision.facts:
            try:
                stored = self._last_stored = await self._ledger.append(decision.facts)
                self._time_append(stored)
            except (PayloadTooLarge, LedgerFull):
                raise
            except MeshError as error:
                raise self._ledger.failure(error) from error
            self._warn_of_full_ledger()
        goal = self._core.weight_goal() if self._core.state.spec is not None else None
        return _Release(self._ledger.head, stored, decision.effects, goal)

    def _warn_of_full_ledger(self) -> None:
        if not self._warned and self._ledger.used > LEDGER_WARN_SHARE and not self._core.state.ended:
            self._warned = True
            _log.warning(
                "ledger nearly full: run=%s used=%.0f%%: at 100%% the run ends; raise "
                "`coordinator.streams.ledger_bytes_max`",
                self.run,
                100 * self._ledger.used,
            )

    def _time_append(self, stored: asyncio.Future[int]) -> None:
        if metrics.is_on():
            asked_s = self._clock.monotonic_s()
            stored.add_done_callback(
                lambda _: metrics.observe(APPEND_SECONDS, self._clock.monotonic_s() - asked_s, self.run)
            )

    def _read(self, item: QueuedRead) -> _Release:
        """Read the core. An error fails only its own call, because a read decides nothing."""
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
                await self.enqueue(i.Tick())

    # Releasing --------------------------------------------------------------------------------------------------------

    async def _release_forever(self) -> None:
        while True:
            release = await self._releases.get()
            if release.stored is not None:
                try:
                    await release.stored
                except StreamFull:
                    raise
                except MeshError as error:
                    raise self._ledger.failure(error) from error
            self._release(release)

    def _release(self, release: _Release) -> None:
        if release.goal is not None:
            was_live, self.weight_goal = self.live, release.goal
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
            self._full = False
            self.note_change()

    # Ending -----------------------------------------------------------------------------------------------------------

    async def _guarded(self, loop: Callable[[], Awaitable[None]]) -> None:
        undone: Exception
        try:
            return await loop()
        except (PayloadTooLarge, LedgerFull, StreamFull) as error:
            undone = error
        except MeshError as error:
            if isinstance(error, DataLoss) and await self._ledger.is_gone():
                self._lose(DataLoss(f"the ledger of run {self.run} was deleted from NATS: {error}", run=self.run))
            elif self._closed is None:
                self._stop(
                    NotReady(
                        f"the coordinator of run {self.run} has stopped; retry at the coordinator that leads it now"
                    )
                )
                self._on_failure(self.run, error)
            return
        except Exception as error:  # noqa: BLE001 (the one recording point for bugs of the core)
            undone = error
        if loop != self._decide_forever:
            self.recover_from(undone)
            return
        asked = self._deciding  # earlier decisions are stored and answered first
        await self._releases.put(_Release(self._ledger.head, act=lambda: self._go_back(undone, asked)))

    async def _end_work(self) -> None:
        """End all work except the calling task, and wait for appends in progress."""
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._effects.close()
        if self._last_stored is not None:
            await asyncio.wait([self._last_stored], timeout=CLOSE_S_MAX)

    def _stop(self, error: MeshError) -> None:
        """Reply to every caller with `error`, and end all work."""
        self._shut(error)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._effects.cancel()

    def _is_purged(self, sequence: int) -> bool:
        return file_of(sequence) in self.purged_files if in_file(sequence) else 0 < sequence < self.purged_below

    def _shut(self, error: MeshError) -> None:
        self._closed = self._closed or error
        self._reject_all(error)


def _internal(run: str, what: str, cause: str, since: str) -> Internal:
    return Internal(
        f"run {run}: {what} failed because of a bug of the coordinator ({cause[:CAUSE_CHARS_MAX]}): {since}; do not "
        "repeat the request, and report the coordinator's log",
        run=run,
    )


def without_purged(request: i.ReportEpisodes, is_purged: Callable[[int], bool]) -> i.ReportEpisodes:
    """Return the same reports, except that reports with a purged payload name no attempt, so that the core answers
    UNKNOWN_LEASE."""
    if not any(is_purged(report.payload.sequence) for report in request.reports):
        return request
    reports = (replace(r, attempt=-1) if is_purged(r.payload.sequence) else r for r in request.reports)
    return structs.replace(request, reports=tuple(reports))
