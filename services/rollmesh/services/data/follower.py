"""Follow the ledger of one run, and keep the state of its draws current.

    ledger (RM_<run>_LEDGER)  ->  follower task  ->  RunDraws  <-  positions()      waits for a later ledger position

With a `SnapshotFolder`, the fold begins at the newest usable snapshot. A snapshot is stored every `snapshot_records`
records and by `close`. Only the task writes the state. A call waits, with a timeout, until the fold has reached the
requested position. The first call also waits for all records that the ledger held when the follower began, so a
restarted service never uses a half-folded state.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass

import msgpack

from rollmesh.services.data.draws import RunDraws
from rollmesh.services.data.selector import SourceShare
from rollmesh.services.data.snapshots import SnapshotFolder
from rollmesh.shared.bus.bus import BusUnavailable, StreamLog, StreamRecord, UnknownRecord
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ledger_facts import facts_of, read_record
from rollmesh.shared.domain.plans import Plan
from rollmesh.shared.errors import CatchingUp, CorruptSnapshot
from rollmesh.v1 import events_pb2

_log = logging.getLogger(__name__)

RECONNECT_S = 0.5
"""Pause after a follower failed, in seconds. The bus has already retried by then."""

CANCEL_AGAIN_S = 0.05

_SCHEMA = "data@2"
"""Format of a snapshot. One of another format is skipped, and the ledger is folded instead."""


class RunFollower:
    """Folds one ledger from `open` or `start` until `close`. `restore` restarts from a snapshot."""

    def __init__(
        self,
        *,
        run: str,
        ledger: StreamLog,
        draws: RunDraws,
        clock: Clock,
        catch_up_s_max: float,
        snapshots: SnapshotFolder | None = None,
        snapshot_records: int = 0,
    ) -> None:
        self.run = run
        self._snapshots = snapshots
        self._snapshot_records = snapshot_records
        self._ledger = ledger
        self._draws = draws
        self._clock = clock
        self._catch_up_s_max = catch_up_s_max
        self._position = 0
        self._record_id = ""
        """Id of the record at the position. It distinguishes this ledger from another one of the same name."""
        self._saved = 0
        """Position of the newest snapshot on disk."""
        self._floor = 0
        """Last sequence of the ledger when following began. No call is served before the fold reaches it."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new event, when the position moves or the task ends."""
        self._restoring = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._cause = ""
        """Cause for which the fold is stalled. Empty if it is not stalled."""
        self._warned = False
        self.ended = False
        """Whether the run has ended."""

    @property
    def position(self) -> int:
        """Ledger sequence of the last folded record; 0 before the first."""
        return self._position

    @property
    def source_shares(self) -> list[SourceShare]:
        """Shares of the sources, see `RunDraws.source_shares`."""
        return self._draws.source_shares()

    async def open(self) -> None:
        """Restore the newest usable snapshot, if one exists, and begin to follow."""
        for path, state in self._snapshots.load(self.run) if self._snapshots is not None else ():
            try:
                await self._restore(state)
            except CorruptSnapshot as error:
                _log.warning("snapshot skipped: %s: %s", path, error)
                continue
            self._saved = self._position
            _log.info("draws restored: run=%s snapshot=%s ledger_sequence=%d", self.run, path, self._position)
            break
        await self.start()

    async def start(self) -> None:
        """Begin to follow after the current position."""
        self._floor = (await self._ledger.info()).last_seq
        self._task = asyncio.create_task(self._follow(), name=f"data follows {self.run}")
        self._task.add_done_callback(lambda _: self._notify())

    async def close(self) -> None:
        """Stop following and store a snapshot. Idempotent."""
        await self._stop()
        await self._save()

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            # Repeatedly: the NATS client uses `asyncio.wait_for`, which before Python 3.12 loses a cancellation that
            # arrives together with the response. The task would then continue to follow.
            while not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
            if not task.cancelled():
                task.exception()  # every caller has got it; reading marks it as retrieved

    async def draws(self, *, policy: str, first_draw: int, num: int, ledger_position: int) -> list[tuple[int, Plan]]:
        """Return positions and plans as `RunDraws` does, once the fold has reached `ledger_position`. Raise CatchingUp
        after the timeout."""
        await self._caught_up(ledger_position)
        await asyncio.to_thread(self._draws.selector(policy).prepare, first_draw, num)
        positions = self._draws.positions(policy, first_draw, num)
        return list(zip(positions, self._draws.plans(policy, first_draw, len(positions)), strict=True))

    async def snapshot(self) -> tuple[bytes, int]:
        """Return the state and its ledger sequence, which is at least the end of the ledger when the call began."""
        await self._caught_up((await self._ledger.info()).last_seq)
        return self._packed(), self._position

    async def restore(self, state: bytes) -> int:
        """Replace the state, follow from its position, and return it. Raise CorruptSnapshot without a change."""
        await self._check_ledger(_unpack(state, self.run))
        async with self._restoring:
            await self._stop()
            try:
                await self._restore(state)
            finally:
                await self.start()
        return self._position

    async def _restore(self, state: bytes) -> None:
        parts = _unpack(state, self.run)
        await self._check_ledger(parts)
        self._draws.restore(parts.draws)
        self._position, self._record_id = parts.position, parts.record_id

    async def _check_ledger(self, parts: _Parts) -> None:
        """Raise CorruptSnapshot unless the ledger has the same record at the position of the snapshot."""
        if not parts.position:
            return
        try:
            found = (await self._ledger.read(parts.position)).msg_id
        except UnknownRecord:
            found = ""
        if found != parts.record_id:
            raise CorruptSnapshot(
                f"record {parts.position} of the ledger of {self.run} must have the id {parts.record_id!r} of the "
                f"snapshot, got {found!r}; the snapshot is of another ledger: fold this one without it"
            )

    def _packed(self) -> bytes:
        state = {
            "schema": _SCHEMA,
            "run": self.run,
            "position": self._position,
            "record_id": self._record_id,
            "draws": self._draws.snapshot(),
        }
        return bytes(msgpack.packb(state))

    async def _save(self) -> None:
        """Store a snapshot. If it cannot be written, only the next start takes longer."""
        if self._snapshots is None or self._position == self._saved:
            return
        state, self._saved = self._packed(), self._position
        try:
            await asyncio.to_thread(self._snapshots.save, self.run, self._saved, state)
        except OSError as error:
            _log.warning("snapshot not written: run=%s: %s", self.run, error)

    async def _caught_up(self, ledger_position: int) -> None:
        wanted = max(ledger_position, self._floor)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._catch_up_s_max):
                while not self._failed() and self._position < wanted:
                    await self._changed.wait()
        if self._position < wanted:
            raise self._catching_up(wanted)

    def _failed(self) -> bool:
        """Return whether the task has ended. Raise the error that ended it."""
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
                    if self._snapshot_records and self._position - self._saved >= self._snapshot_records:
                        await self._save()
                self._cause = "the ledger's reader ended"
            except BusUnavailable as error:
                self._cause = error.message
            await self._clock.sleep(RECONNECT_S)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _fold(self, record: StreamRecord) -> None:
        facts = list(facts_of(read_record(record.payload, self.run, record.seq)))
        self._draws.apply(facts)
        self._warn_if_blind()
        self.ended = self.ended or any(isinstance(fact, events_pb2.RunEnded) for fact in facts)
        if any(isinstance(fact, events_pb2.RunChanged) and fact.reopened for fact in facts):
            self.ended = False
        self._position, self._record_id = record.seq, record.msg_id
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


@dataclass(frozen=True, slots=True)
class _Parts:
    """An unpacked snapshot."""

    position: int
    record_id: str
    draws: bytes


def _unpack(state: bytes, run: str) -> _Parts:
    try:
        fields = msgpack.unpackb(state)
        schema, of_run = fields["schema"], fields["run"]
        parts = _Parts(int(fields["position"]), str(fields.get("record_id", "")), bytes(fields["draws"]))
    except (msgpack.UnpackException, ValueError, KeyError, TypeError) as error:
        raise CorruptSnapshot(f"not a snapshot of the data service: {error!r}; fold the ledger without it") from error
    if schema != _SCHEMA or of_run != run:
        raise CorruptSnapshot(f"the snapshot is a {schema} of run {of_run}, expected a {_SCHEMA} of run {run}")
    return parts
