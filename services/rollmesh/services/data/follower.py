"""One run's draws, kept up to date by following its ledger.

    ledger (RM_<run>_LEDGER)  ->  follower task  ->  RunDraws  <-  positions()      who waits: a call that names a later position

The task is the only writer of the state; a call waits, up to a limit, until the fold has reached the position it asks for.
A call that arrives first waits for what the ledger held when the follower began, so that a restarted service never answers
from a half-folded state.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import msgpack
from google.protobuf.message import DecodeError

from rollmesh.services.data.draws import RunDraws
from rollmesh.services.data.facts import RunClosed, facts_of
from rollmesh.shared.bus.bus import BusUnavailable, Record, StreamLog
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import CatchingUp, CorruptSnapshot, DataLoss
from rollmesh.v1 import events_pb2

_log = logging.getLogger(__name__)

RECONNECT_S = 0.5
"""Pause after the bus gave up on a follower; the bus itself has retried by then."""

CANCEL_AGAIN_S = 0.05

_SCHEMA = "data@1"


class RunFollower:
    """Folds one ledger. Between `start` and `close`; `restore` starts again from a snapshot."""

    def __init__(self, *, run: str, ledger: StreamLog, draws: RunDraws, clock: Clock, catch_up_s_max: float) -> None:
        self.run = run
        self._ledger = ledger
        self._draws = draws
        self._clock = clock
        self._catch_up_s_max = catch_up_s_max
        self._position = 0
        self._floor = 0
        """What the ledger held when following began: nothing is answered before."""
        self._changed = asyncio.Event()
        """Set, and replaced by a fresh one, whenever the position moves or the task ends."""
        self._restoring = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._cause = ""
        """Why the fold stands still, if it does."""
        self._warned = False
        self.ended = False
        """Whether the run has ended."""

    @property
    def position(self) -> int:
        """Ledger sequence of the last folded record; 0 before the first."""
        return self._position

    async def start(self) -> None:
        """Begins to follow after the current position."""
        self._floor = (await self._ledger.info()).last_seq
        self._task = asyncio.create_task(self._follow(), name=f"data follows {self.run}")
        self._task.add_done_callback(lambda _: self._notify())

    async def close(self) -> None:
        """Stops following. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            # More than once: the NATS client waits with `asyncio.wait_for`, which before Python 3.12 swallows a cancellation
            # that arrives together with the answer; the task would then go on following.
            while not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
            if not task.cancelled():
                task.exception()  # told to every caller already; asking marks it as seen

    async def positions(self, *, policy: str, first_draw: int, num: int, ledger_position: int) -> list[int]:
        """As `RunDraws.positions`, from a state that has seen `ledger_position`. CatchingUp if it has not in time."""
        await self._caught_up(ledger_position)
        return self._draws.positions(policy, first_draw, num)

    async def snapshot(self) -> tuple[bytes, int]:
        """The state and the ledger sequence it stands at: no earlier than the ledger's end when the call began."""
        await self._caught_up((await self._ledger.info()).last_seq)
        state = {"schema": _SCHEMA, "run": self.run, "position": self._position, "draws": self._draws.snapshot()}
        return bytes(msgpack.packb(state)), self._position

    async def restore(self, state: bytes) -> int:
        """Replaces the state and follows from its position, which is returned. CorruptSnapshot; then nothing changes."""
        position, draws = _unpack(state, self.run)
        last = (await self._ledger.info()).last_seq
        if position > last:
            raise CorruptSnapshot(
                f"the snapshot stands at ledger sequence {position}, the ledger of {self.run} ends at {last}; "
                "it is of another ledger: leave it out to fold this one from its start"
            )
        async with self._restoring:
            await self.close()
            try:
                self._draws.restore(draws)
                self._position = position
            finally:
                await self.start()
        return position

    async def _caught_up(self, ledger_position: int) -> None:
        wanted = max(ledger_position, self._floor)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._catch_up_s_max):
                while not self._failed() and self._position < wanted:
                    await self._changed.wait()
        if self._position < wanted:
            raise self._catching_up(wanted)

    def _failed(self) -> bool:
        """Whether nothing will be folded any more; raises what ended the task, if something did."""
        if self._task is None or not self._task.done():
            return False
        return self._task.cancelled() or self._task.result() is None

    def _catching_up(self, wanted: int) -> CatchingUp:
        cause = f" ({self._cause})" if self._cause else ""
        return CatchingUp(
            f"the draws of {self.run} have folded the ledger up to {self._position} of {wanted}{cause}; retry",
            position=self._position,
            wanted=wanted,
        )

    async def _follow(self) -> None:
        while True:
            try:
                async for record in self._ledger.follow(self._position + 1):
                    self._fold(record)
                self._cause = "the ledger's reader ended"
            except BusUnavailable as error:
                self._cause = error.message
            await self._clock.sleep(RECONNECT_S)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _fold(self, record: Record) -> None:
        facts = list(facts_of(_decode(record, self.run)))
        if facts:
            self._draws.apply(facts)
            self._warn_if_blind()
        self.ended = self.ended or any(isinstance(fact, RunClosed) for fact in facts)
        self._position = record.seq
        self._cause = ""
        self._notify()

    def _warn_if_blind(self) -> None:
        if self._draws.num_unlearned and not self._warned:
            self._warned = True
            _log.warning(
                "run %s: a decided group has no reward `%s`, so the selector learns nothing from it; "
                "set `success_reward` to a reward that a scorer gives",
                self.run,
                self._draws.success_reward,
            )


def _decode(record: Record, run: str) -> events_pb2.LedgerRecord:
    message = events_pb2.LedgerRecord()
    try:
        message.ParseFromString(record.payload)
    except DecodeError as error:
        raise DataLoss(
            f"ledger record {record.seq} of {run} cannot be read: {error}; audit the run", seq=record.seq
        ) from error
    return message


def _unpack(state: bytes, run: str) -> tuple[int, bytes]:
    try:
        fields = msgpack.unpackb(state)
        schema, of_run, position, draws = (
            fields["schema"],
            fields["run"],
            int(fields["position"]),
            bytes(fields["draws"]),
        )
    except (msgpack.UnpackException, ValueError, KeyError, TypeError) as error:
        raise CorruptSnapshot(
            f"not a snapshot of the data service: {error!r}; leave it out to fold the ledger"
        ) from error
    if schema != _SCHEMA or of_run != run:
        raise CorruptSnapshot(f"the snapshot is a {schema} of run {of_run}, expected a {_SCHEMA} of run {run}")
    return position, draws
