"""Stream the samples of a run with export, from its ledger and its sample stream.

The ledger holds the scored episodes in order, their tasks and the end of the run, so the gateway does not call the
coordinator. The position of a reader is (record, fact); it is the same at every gateway and does not change. Each
stream reads the ledger from its first record, because the tasks are stored there.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from google.protobuf.message import Message

from rollmesh.services.gateway.payloads import EpisodeRef, read_episode, scored_ref
from rollmesh.shared.bus.archive_bus import open_ledger
from rollmesh.shared.bus.bus import Bus, StreamLog, StreamRecord, UnknownStream
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.codec.failure import encode_failure
from rollmesh.shared.domain.ledger_facts import fact_of, read_record
from rollmesh.shared.domain.ledger_head import record_hash
from rollmesh.shared.errors import HasLearner, InvalidInput, PayloadLost, UnknownRun, field_error
from rollmesh.v1 import events_pb2, run_pb2, types_pb2

Place = tuple[int, int]
"""(sequence of the ledger record, index of the fact in it)."""
START: Place = (0, 0)


class Exports:
    """Stream samples of the runs on one bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def stream(self, run: str, cursor: str) -> AsyncIterator[run_pb2.StreamSamplesResponse]:
        """Yield scored episodes after `cursor` until the run has ended.

        Raise UnknownRun, HasLearner, InvalidInput, PayloadLost, DataLoss or NewerFormat.
        """
        after = parse_cursor(cursor)
        ledger, samples = await self._open(run)
        story = _Story(run)
        async for record in ledger.follow(1):
            for found in story.enter(record):
                if found.place > after:
                    yield await _response(samples, found, record_hash(record.payload))
            if story.ended:
                return

    async def _open(self, run: str) -> tuple[StreamLog, StreamLog]:
        try:
            streams = run_streams(run)
            return await open_ledger(self._bus, run), await self._bus.open(streams.samples.name)
        except (UnknownStream, InvalidInput) as error:
            raise UnknownRun(f"run {run!r} does not exist; CreateRun first", run=run) from error


@dataclass(frozen=True, slots=True)
class _ExportedEpisode:
    place: Place
    task: types_pb2.Task
    ref: EpisodeRef


@dataclass(slots=True)
class _Story:
    """State from the ledger records read so far. Tasks are kept while episodes of their groups are open."""

    run: str
    ended: bool = False
    tasks: dict[str, types_pb2.Task] = field(default_factory=dict)
    num_open: dict[str, int] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    """Newest attempts of open episodes."""

    def enter(self, record: StreamRecord) -> Iterator[_ExportedEpisode]:
        """Yield the episodes that this record reports as scored."""
        for index, fact in enumerate(read_record(record.payload, self.run, record.seq).facts):
            scored = self._enter(fact_of(fact), (record.seq, index))
            if scored is not None:
                yield scored

    def _enter(self, fact: Message | None, place: Place) -> _ExportedEpisode | None:
        match fact:
            case events_pb2.RunCreated() if not fact.spec.export_groups:
                what = f"run {self.run} trains on its samples (export_groups = 0): lease batches"
                raise HasLearner(what, run=self.run)
            case events_pb2.GroupReserved():
                self.tasks[fact.group] = fact.task
                self.num_open[fact.group] = fact.num_episodes
            case events_pb2.EpisodeLeased():
                self.attempts[fact.episode] = fact.attempt
            case events_pb2.EpisodeEnded():
                self.attempts.pop(fact.episode, None)
                self._close(fact.group)
            case events_pb2.EpisodeScored():
                return self._scored(fact, place)
            case events_pb2.RunEnded():
                self.ended = True
        return None

    def _scored(self, fact: events_pb2.EpisodeScored, place: Place) -> _ExportedEpisode:
        task = self.tasks[fact.group]
        self._close(fact.group)
        key = types_pb2.EpisodeKey(
            run=self.run,
            task=task.task_id,
            group=fact.group,
            episode=fact.episode,
            attempt=self.attempts.pop(fact.episode, 0),
        )
        return _ExportedEpisode(place, task, scored_ref(fact, key))

    def _close(self, group: str) -> None:
        self.num_open[group] -= 1
        if not self.num_open[group]:
            del self.tasks[group], self.num_open[group]


async def _response(samples: StreamLog, scored: _ExportedEpisode, ledger_hash: str) -> run_pb2.StreamSamplesResponse:
    cursor = format_cursor(scored.place)
    try:
        read = await read_episode(samples, scored.ref)
    except PayloadLost as error:
        what = f"{samples.name} does not hold the payload {scored.ref.sequence} of {', '.join(scored.ref.sample_ids)}"
        raise PayloadLost(f"{what}; cursor {cursor} continues after it", cursor=cursor) from error
    return run_pb2.StreamSamplesResponse(
        episode=read.episode if read.error is None else None,
        task=scored.task,
        cursor=cursor,
        failure=encode_failure(read.error) if read.error is not None else None,
        ledger_position=scored.place[0],
        ledger_hash=ledger_hash,
    )


def format_cursor(place: Place) -> str:
    return f"{place[0]}.{place[1]}"


def parse_cursor(text: str) -> Place:
    """Parse a cursor. Raise InvalidInput if `format_cursor` cannot have returned it."""
    if not text:
        return START
    if not re.fullmatch(r"[0-9]{1,19}\.[0-9]{1,9}", text):
        raise field_error("cursor", "be the cursor of a response, or empty to start at the first episode", text)
    record, _, fact = text.partition(".")
    return int(record), int(fact)
