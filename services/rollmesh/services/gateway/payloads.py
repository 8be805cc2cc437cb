"""Read the payloads of a batch lease from the run's sample stream by sequence, or from its files by position.

A payload that cannot be read, or that contradicts the metadata of a leased sample, would recur with every lease. The
response holds its failure, so that the trainer drops its samples, and it is recorded as a dead letter. A payload that
is gone raises PAYLOAD_LOST, because the lease may be old. If it is that of a replayed sample, it is a failure as well:
returned samples are in the next batch again.

An episode is read and sent once per fetch, with its leased samples. Shards hold whole episodes, assigned in the order
of their samples' ids. The same lease is therefore always sharded equally, and shards differ by at most one episode.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from rollmesh.services.gateway.metrics import BYTES, EPISODES
from rollmesh.shared.bus.bus import Bus, StreamLog, UnknownRecord, UnknownStream
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.codec.failure import encode_failure
from rollmesh.shared.codec.metadata import check_leased
from rollmesh.shared.errors import DataLoss, MeshError, MetadataMismatch, PayloadLost
from rollmesh.shared.store.payload_files import UnreadableRecord
from rollmesh.shared.telemetry.metrics import count
from rollmesh.v1 import events_pb2, run_pb2, types_pb2

DEAD_LETTER_S_MAX = 5.0
"""Maximum wait of a fetch for its dead letter, in seconds."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EpisodeRef:
    """An episode in the sample stream, with its requested samples as the coordinator described them, sorted by id."""

    sequence: int
    samples: tuple[run_pb2.LeasedSample, ...]

    @property
    def sample_ids(self) -> list[str]:
        return [sample.meta.sample_id for sample in self.samples]


def episode_ref(sequence: int, samples: Iterable[run_pb2.LeasedSample]) -> EpisodeRef:
    return EpisodeRef(sequence, tuple(sorted(samples, key=lambda sample: sample.meta.sample_id)))


def scored_ref(scored: events_pb2.EpisodeScored, key: types_pb2.EpisodeKey) -> EpisodeRef:
    """Return the episode of a ledger record with all of its samples. No finalizer has changed their rewards."""
    samples = (run_pb2.LeasedSample(meta=meta, key=key, rewards_as_reported=True) for meta in scored.samples)
    return episode_ref(scored.payload.sequence, samples)


def episodes_of(samples: Iterable[run_pb2.LeasedSample]) -> list[EpisodeRef]:
    """Return the episodes of `samples`, sorted by the id of their first sample. Raise PayloadLost for a sample without
    payload."""
    found: dict[int, list[run_pb2.LeasedSample]] = {}
    for sample in samples:
        if sample.payload.sequence == 0:
            raise _lost(sample.meta.sample_id, "it was reported without a payload")
        found.setdefault(sample.payload.sequence, []).append(sample)
    episodes = [episode_ref(sequence, of_episode) for sequence, of_episode in found.items()]
    return sorted(episodes, key=lambda episode: episode.sample_ids)


@dataclass(frozen=True, slots=True)
class Read:
    """A payload, or the reason why it cannot be trained on."""

    ref: EpisodeRef
    episode: types_pb2.Episode | None
    error: DataLoss | None = None


def shard(episodes: Sequence[EpisodeRef], index: int, num: int) -> Sequence[EpisodeRef]:
    """Return shard `index` of `num`."""
    return episodes[index::num]


class PayloadReader:
    """Read episodes from the bus, at most `reads_max` concurrently per call."""

    def __init__(self, bus: Bus, *, reads_max: int, who: str = "gateway", clock: Clock | None = None) -> None:
        self._bus = bus
        self._reads_max = reads_max
        self._who = who
        self._clock = clock or SystemClock()

    async def read(self, run: str, episodes: Sequence[EpisodeRef]) -> AsyncIterator[run_pb2.FetchSamplesResponse]:
        """Yield the episodes in order, or the failure of one that contradicts its report. Raise PayloadLost if one is
        gone."""
        if not episodes:
            return
        try:
            log = await self._bus.open(run_streams(run).samples.name)
        except UnknownStream as error:
            raise _lost(episodes[0].sample_ids[0], "the sample stream is gone") from error
        waiting: deque[asyncio.Task[Read]] = deque()
        try:
            for episode in episodes:
                waiting.append(asyncio.create_task(read_episode(log, episode)))
                if len(waiting) >= self._reads_max:
                    yield await self._checked(run, waiting.popleft())
            while waiting:
                yield await self._checked(run, waiting.popleft())
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _checked(self, run: str, reading: asyncio.Task[Read]) -> run_pb2.FetchSamplesResponse:
        read = await reading
        if read.error is None:
            return run_pb2.FetchSamplesResponse(episode=read.episode, sample_ids=read.ref.sample_ids)
        await self._dead_letter(run, read.ref, read.error)
        return run_pb2.FetchSamplesResponse(sample_ids=read.ref.sample_ids, failure=encode_failure(read.error))

    async def _dead_letter(self, run: str, ref: EpisodeRef, error: DataLoss) -> None:
        """Record one dead letter per payload, however often it is fetched. Its loss does not affect samples."""
        letter = events_pb2.DeadLetter(
            kind=events_pb2.DEAD_KIND_PAYLOAD,
            subject=ref.sample_ids[0],
            cause=error.message,
            who=self._who,
            time_unix_s=self._clock.wall_s(),
            payload_sequence=ref.sequence,
        )
        try:
            dead = await self._bus.open(run_streams(run).dead.name)
            await dead.append(
                letter.SerializeToString(), msg_id=f"payload-{ref.sequence}", deadline_s=DEAD_LETTER_S_MAX
            )
        except MeshError as unstored:
            _log.warning("cannot record a dead letter: run=%s error=%s cause=%s", run, error, unstored)


async def read_episode(log: StreamLog, ref: EpisodeRef) -> Read:
    """Return the payload of `ref`, or its error if it contradicts the report. Raise PayloadLost if it is gone, unless
    the samples are replayed."""
    try:
        record = await log.read_direct(ref.sequence)
    except UnreadableRecord as error:
        return Read(ref, None, PayloadLost(error.message))
    except UnknownRecord as error:
        if any(sample.replay_of for sample in ref.samples):  # the next lease would have the same samples
            return Read(ref, None, PayloadLost(f"record {ref.sequence} of {log.name} is gone; drop its samples"))
        raise _lost(ref.sample_ids[0], f"record {ref.sequence} of {log.name} is gone") from error
    try:
        episode = types_pb2.Episode.FromString(record.payload)
    except DecodeError:
        what = f"record {ref.sequence} of {log.name} is not an episode: {len(record.payload)} bytes; drop its samples"
        return Read(ref, None, PayloadLost(what))
    try:
        for sample in ref.samples:
            check_leased(episode, sample)
    except MetadataMismatch as error:
        return Read(ref, None, error)
    count(EPISODES)
    count(BYTES, amount=len(record.payload))
    return Read(ref, episode)


def _lost(sample_id: str, why: str) -> PayloadLost:
    return PayloadLost(f"sample {sample_id} has no payload: {why}; ReleaseBatch and lease again", sample_id=sample_id)
