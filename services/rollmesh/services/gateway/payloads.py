"""Payloads of a batch lease, read from the run's sample stream by sequence.

An episode is read once per fetch and sent once, with the leased samples of it. Shards hold whole episodes, dealt out in the order of
their samples' ids, so that the same lease is always sharded alike and no shard is more than one episode larger than another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from rollmesh.services.gateway.metrics import BYTES, EPISODES
from rollmesh.shared.bus.bus import Bus, StreamLog, UnknownRecord, UnknownStream
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import PayloadLost
from rollmesh.shared.telemetry.metrics import count
from rollmesh.v1 import run_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class EpisodeRef:
    """An episode in the sample stream, and the leased samples of it, sorted."""

    sequence: int
    sample_ids: tuple[str, ...]


def episodes_of(samples: Iterable[run_pb2.LeasedSample]) -> list[EpisodeRef]:
    """The episodes that hold `samples`, by their first sample's id. Raises PayloadLost for a sample without payload."""
    found: dict[int, list[str]] = {}
    for sample in samples:
        if sample.payload.sequence == 0:
            raise _lost(sample.meta.sample_id, "it was reported without a payload")
        found.setdefault(sample.payload.sequence, []).append(sample.meta.sample_id)
    episodes = [EpisodeRef(sequence, tuple(sorted(ids))) for sequence, ids in found.items()]
    return sorted(episodes, key=lambda episode: episode.sample_ids)


def shard(episodes: Sequence[EpisodeRef], index: int, num: int) -> Sequence[EpisodeRef]:
    """Shard `index` of `num`."""
    return episodes[index::num]


class Payloads:
    """Reads episodes from the bus, at most `reads_max` at once per call."""

    def __init__(self, bus: Bus, *, reads_max: int) -> None:
        self._bus = bus
        self._reads_max = reads_max

    async def read(self, run: str, episodes: Sequence[EpisodeRef]) -> AsyncIterator[run_pb2.FetchSamplesResponse]:
        """The episodes, in order. Raises PayloadLost for one that is gone or is not what was reported."""
        if not episodes:
            return
        try:
            log = await self._bus.open(run_streams(run).samples.name)
        except UnknownStream as error:
            raise _lost(episodes[0].sample_ids[0], "the sample stream is gone") from error
        waiting: deque[asyncio.Task[run_pb2.FetchSamplesResponse]] = deque()
        try:
            for episode in episodes:
                waiting.append(asyncio.create_task(_fetch(log, episode)))
                if len(waiting) >= self._reads_max:
                    yield await waiting.popleft()
            while waiting:
                yield await waiting.popleft()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def _fetch(log: StreamLog, ref: EpisodeRef) -> run_pb2.FetchSamplesResponse:
    return run_pb2.FetchSamplesResponse(episode=await read_episode(log, ref), sample_ids=ref.sample_ids)


async def read_episode(log: StreamLog, ref: EpisodeRef) -> types_pb2.Episode:
    """The payload behind `ref`. Raises PayloadLost if it is gone or is not what was reported."""
    try:
        record = await log.read(ref.sequence)
        episode = types_pb2.Episode.FromString(record.payload)
        count(EPISODES)
        count(BYTES, amount=len(record.payload))
    except (UnknownRecord, DecodeError) as error:
        raise _lost(ref.sample_ids[0], f"record {ref.sequence} of {log.name} is gone or unreadable") from error
    missing = set(ref.sample_ids) - {sample.sample_id for sample in episode.samples}
    if missing:
        raise _lost(min(missing), f"record {ref.sequence} of {log.name} does not hold it")
    return episode


def _lost(sample_id: str, why: str) -> PayloadLost:
    return PayloadLost(f"sample {sample_id} has no payload: {why}; ReleaseBatch and lease again", sample_id=sample_id)
