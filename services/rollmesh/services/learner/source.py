"""A leased batch as training samples: metadata of the lease and payloads of the fetch, put together.

The lease decides what may be trained, with which rewards and which tokens masked; the payload only brings the tokens.
Samples come out in the order of the lease, however the payloads arrived: the trainer's minibatches depend on the order.
A payload that cannot be read costs its own samples, not the run: they are named in `unreadable` and are to be dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rollmesh.shared.codec.trajectory import decode_episode, decode_rewards
from rollmesh.shared.errors import InvalidInput, PayloadLost
from rollmesh.shared.trajectory import Episode, Sample, Segment, Source, TrainingSample
from rollmesh.v1 import run_pb2

UNREADABLE = "UNREADABLE"
"""Reason of samples whose payload is malformed, or does not hold them as the lease says. The gateway names other reasons."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a lease brought. Every leased sample is in exactly one of the two."""

    samples: list[TrainingSample] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Sample id -> the reason to drop it with."""
    traceparents: tuple[str, ...] = ()
    """Contexts of the episodes that are traced."""


class BatchAssembler:
    """Takes the messages of one fetch."""

    def __init__(self, leased: Sequence[run_pb2.LeasedSample]) -> None:
        self._leased = {sample.meta.sample_id: sample for sample in leased}
        self._found: dict[str, TrainingSample] = {}
        self._unreadable: dict[str, str] = {}
        self._traceparents: list[str] = []

    def add(self, message: run_pb2.FetchSamplesResponse) -> None:
        """Takes one episode. Samples of it that are not leased are passed over."""
        wanted = [sample_id for sample_id in message.sample_ids if sample_id in self._leased]
        if message.HasField("failure"):
            self._drop(wanted, message.failure.reason or UNREADABLE, message.failure.message)
            return
        try:
            episode = decode_episode(message.episode)
        except InvalidInput as err:
            self._drop(wanted, UNREADABLE, err.message)
            return
        if episode.traceparent:
            self._traceparents.append(episode.traceparent)
        by_id = {sample.sample_id: sample for sample in episode.samples}
        for sample_id in wanted:
            try:
                self._found[sample_id] = _training_sample(self._leased[sample_id], episode, by_id.get(sample_id))
            except InvalidInput as err:
                self._drop([sample_id], UNREADABLE, err.message)

    def finish(self) -> Fetched:
        """The whole batch, in the order of the lease. Raises `PayloadLost` if a sample did not arrive at all."""
        missing = [s for s in self._leased if s not in self._found and s not in self._unreadable]
        if missing:
            raise PayloadLost(
                f"{len(missing)} leased samples did not arrive, first {missing[0]}; release the batch and lease again",
                sample_id=missing[0],
            )
        readable = [self._found[s] for s in self._leased if s in self._found]
        return Fetched(readable, dict(self._unreadable), tuple(self._traceparents))

    def _drop(self, samples: Sequence[str], reason: str, cause: str) -> None:
        self._unreadable.update(dict.fromkeys(samples, reason))
        _log.warning("cannot train on %s, dropped as %s: %s", ", ".join(samples), reason, cause)


def _training_sample(leased: run_pb2.LeasedSample, episode: Episode, sample: Sample | None) -> TrainingSample:
    meta = leased.meta
    if sample is None or sample.leaf != meta.leaf:
        raise InvalidInput(f"episode {episode.key.episode} does not hold sample {meta.sample_id} as it was reported")
    rewards = decode_rewards(meta.rewards)
    segments = episode.path_segments(sample)
    if leased.mask_below_step > 0:
        segments = tuple(_masked(s, policy=sample.policy, below=leased.mask_below_step) for s in segments)
    return TrainingSample(
        sample=replace(sample, rewards=rewards, trainable=meta.trainable),
        segments=segments,
        group=leased.group,
        task=leased.task,
        episode=episode.key.episode,
        staleness=None if leased.staleness < 0 else leased.staleness,
        sampling_params=episode.sampling_params,
    )


def _masked(segment: Segment, *, policy: str, below: int) -> Segment:
    """Without loss if `policy` sampled it at a step below `below`. The bound is about a policy's own tokens alone."""
    version = segment.version
    if segment.source is not Source.POLICY or version is None or version.policy != policy or version.step >= below:
        return segment
    return replace(segment, loss_mask=np.zeros(segment.num_tokens, np.uint8))
