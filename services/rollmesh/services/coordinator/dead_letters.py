"""Dead letters of a run, for operators: listed, and replayed on their word.

The stream is for people and drops its oldest letters; that a letter was replayed is a fact of the ledger. Collaborators: `effects` and the
gateway write, `run_servicer` asks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from google.protobuf.message import DecodeError

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.facts import Purpose, Task
from rollmesh.services.coordinator.driver import RunDriver
from rollmesh.services.coordinator.fact_codec import decode
from rollmesh.services.coordinator.translate import invalid
from rollmesh.shared.bus.bus import Bus, StreamLog, UnknownRecord
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import FailedPrecondition
from rollmesh.v1 import events_pb2, run_pb2, types_pb2

LIST_MAX = 1000
PIECE_BYTES = 1 << 20
"""Size of the letters that are replayed by one decision."""


class NotReplayable(FailedPrecondition):
    """The dead letter holds no task that could be tried again."""

    reason = "NOT_REPLAYABLE"


class DeadLetters:
    """Reads and replays the letters of any run on a bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def list(self, driver: RunDriver, *, after: int, num_max: int) -> list[run_pb2.ListedLetter]:
        """Letters after sequence `after`, oldest first."""
        if not 0 <= num_max <= LIST_MAX:
            raise invalid("num_max", f"is {num_max}; expected 0 to {LIST_MAX}")
        replayed = await driver.read(lambda core, _: frozenset(core.state.replayed))
        found: list[run_pb2.ListedLetter] = []
        async for letter in self._letters(driver.run, after):
            found.append(run_pb2.ListedLetter(letter=letter, replayed=letter.dead_id in replayed))
            if len(found) == (num_max or LIST_MAX):
                break
        return found

    async def replay(self, driver: RunDriver, dead_ids: Sequence[int]) -> tuple[int, ...]:
        """Has tasks tried again; none named: all that can be. Raises UnknownRecord, NotReplayable, RunEnded."""
        letters = [
            letter async for letter in self._letters(driver.run, 0) if not dead_ids or letter.dead_id in dead_ids
        ]
        if missing := sorted(set(dead_ids) - {letter.dead_id for letter in letters}):
            raise UnknownRecord(
                f"run {driver.run} has no dead letter {missing[0]}; `rollmesh dead list` shows which there are",
                dead_id=missing[0],
            )
        for letter in letters if dead_ids else ():
            _check_replayable(letter)
        replayed: list[int] = []
        for piece in _pieces([letter for letter in letters if _is_replayable(letter)]):
            replayed += await self._replay(driver, piece)
        return tuple(replayed)

    async def _replay(self, driver: RunDriver, letters: Sequence[events_pb2.DeadLetter]) -> tuple[int, ...]:
        tasks = tuple(i.DeadTask(dead_id=one.dead_id, task=decode(Task, one.task), draw=one.draw) for one in letters)
        answer: i.Replayed = await driver.submit(lambda ticket: i.ReplayDead(ticket=ticket, tasks=tasks))
        return answer.dead_ids

    async def _letters(self, run: str, after: int) -> AsyncIterator[events_pb2.DeadLetter]:
        log: StreamLog = await self._bus.open(run_streams(run).dead.name)
        async for record in log.read_range(after + 1):
            yield _read(record.payload, record.seq)


def _read(payload: bytes, dead_id: int) -> events_pb2.DeadLetter:
    """A letter that cannot be read is one all the same: something was given up."""
    try:
        letter = events_pb2.DeadLetter.FromString(payload)
    except DecodeError:
        cause = f"{len(payload)} bytes that are no dead letter"
        letter = events_pb2.DeadLetter(kind=events_pb2.DEAD_KIND_PAYLOAD, cause=cause)
    letter.dead_id = dead_id
    return letter


def _pieces(letters: Sequence[events_pb2.DeadLetter]) -> list[list[events_pb2.DeadLetter]]:
    """The letters in parts, each of which fits one ledger record. At least one part: what refuses a replay refuses none too."""
    pieces: list[list[events_pb2.DeadLetter]] = [[]]
    num_bytes = 0
    for letter in letters:
        num_bytes += letter.ByteSize()
        if pieces[-1] and num_bytes > PIECE_BYTES:
            pieces.append([])
            num_bytes = letter.ByteSize()
        pieces[-1].append(letter)
    return pieces


def _is_replayable(letter: events_pb2.DeadLetter) -> bool:
    return letter.kind == events_pb2.DEAD_KIND_TASK and letter.purpose != types_pb2.PURPOSE_EVAL


def _check_replayable(letter: events_pb2.DeadLetter) -> None:
    if not _is_replayable(letter):
        what = Purpose.EVAL.name if letter.kind == events_pb2.DEAD_KIND_TASK else "payload"
        raise NotReplayable(
            f"dead letter {letter.dead_id} is of {what} {letter.subject}: only tasks of training can be tried again",
            dead_id=letter.dead_id,
        )
