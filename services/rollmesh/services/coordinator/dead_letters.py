"""Dead letters of a run, for operators: listed, and replayed on request.

The stream drops its oldest letters. That a letter was replayed is a fact of the ledger. `effects` and the gateway write
letters, `run_servicer` calls this module.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from google.protobuf.message import DecodeError

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.facts import Purpose, Task
from rollmesh.services.coordinator.driver import RunDriver
from rollmesh.services.coordinator.fact_codec import decode
from rollmesh.services.coordinator.translate import pieces
from rollmesh.shared.bus.bus import Bus, StreamLog, UnknownRecord
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import FailedPrecondition, field_error
from rollmesh.v1 import events_pb2, run_pb2, types_pb2

LIST_MAX = 1000
LIST_BYTES_MAX = 4 * 1024 * 1024
"""Maximum size of the letters that are listed at once, in bytes. One larger letter is listed alone."""


class NotReplayable(FailedPrecondition):
    """The dead letter has no task that can be retried."""

    reason = "NOT_REPLAYABLE"


class DeadLetters:
    """Reads and replays the letters of any run on a bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def list(self, driver: RunDriver, *, after: int, num_max: int) -> list[run_pb2.ListedLetter]:
        """Return letters after sequence `after`, oldest first, as many as fit into a response."""
        if not 0 <= num_max <= LIST_MAX:
            raise field_error("num_max", f"be in [0, {LIST_MAX}]", num_max)
        replayed = await driver.read(lambda core, _: frozenset(core.state.replayed))
        found: list[run_pb2.ListedLetter] = []
        num_bytes = 0
        async for letter in self._letters(driver.run, after):
            num_bytes += letter.ByteSize()
            if found and num_bytes > LIST_BYTES_MAX:
                break
            found.append(run_pb2.ListedLetter(letter=letter, replayed=letter.dead_id in replayed))
            if len(found) == (num_max or LIST_MAX):
                break
        return found

    async def replay(self, driver: RunDriver, dead_ids: Sequence[int]) -> tuple[int, ...]:
        """Replay the named letters, or all that can be replayed. Raises UnknownRecord, NotReplayable, RunEnded."""
        letters = [
            letter async for letter in self._letters(driver.run, 0) if not dead_ids or letter.dead_id in dead_ids
        ]
        if missing := sorted(set(dead_ids) - {letter.dead_id for letter in letters}):
            raise UnknownRecord(
                f"run {driver.run} has no dead letter {missing[0]}; `rollmesh dead list` shows those that exist",
                dead_id=missing[0],
            )
        for letter in letters if dead_ids else ():
            _check_replayable(letter)
        replayed: list[int] = []
        for piece in pieces([letter for letter in letters if _is_replayable(letter)]):  # each fits one ledger record
            replayed += await self._replay(driver, piece)
        return tuple(replayed)

    async def _replay(self, driver: RunDriver, letters: Sequence[events_pb2.DeadLetter]) -> tuple[int, ...]:
        tasks = tuple(i.DeadTask(dead_id=one.dead_id, task=decode(Task, one.task), draw=one.draw) for one in letters)
        answer = await driver.submit(lambda ticket: i.ReplayDead(ticket=ticket, tasks=tasks))
        return answer.dead_ids

    async def _letters(self, run: str, after: int) -> AsyncIterator[events_pb2.DeadLetter]:
        log: StreamLog = await self._bus.open(run_streams(run).dead.name)
        async for record in log.read_range(after + 1):
            yield _read(record.payload, record.seq)


def _read(payload: bytes, dead_id: int) -> events_pb2.DeadLetter:
    """Return a letter. A letter that cannot be decoded is listed too, with the cause."""
    try:
        letter = events_pb2.DeadLetter.FromString(payload)
    except DecodeError:
        cause = f"{len(payload)} bytes that are not a dead letter"
        letter = events_pb2.DeadLetter(kind=events_pb2.DEAD_KIND_PAYLOAD, cause=cause)
    letter.dead_id = dead_id
    return letter


def _is_replayable(letter: events_pb2.DeadLetter) -> bool:
    drawn = letter.purpose != types_pb2.PURPOSE_EVAL and not letter.submitted_key
    return letter.kind == events_pb2.DEAD_KIND_TASK and drawn


def _check_replayable(letter: events_pb2.DeadLetter) -> None:
    if not _is_replayable(letter):
        what = Purpose.EVAL.name if letter.kind == events_pb2.DEAD_KIND_TASK else "payload"
        if letter.submitted_key:
            what = f"submitted samples {letter.submitted_key}, in"
        raise NotReplayable(
            f"dead letter {letter.dead_id} is of {what} {letter.subject}: only tasks of training can be retried",
            dead_id=letter.dead_id,
        )
