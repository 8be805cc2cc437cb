"""Convert a fetched batch to training samples.

The lease decides which samples may be trained, with which rewards and which masked tokens; the payload only has the
tokens. Samples keep the order of the lease, because the trainer's minibatches depend on it. If a payload cannot be
decoded, only its samples are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from rollmesh.client import Batch
from rollmesh.shared.codec.trajectory import decode_episode, decode_group_context, decode_rewards
from rollmesh.shared.domain.trajectory import Episode, GroupContext, Segment, Source, TrainingSample
from rollmesh.shared.errors import InvalidInput
from rollmesh.v1 import run_pb2, types_pb2

UNREADABLE = "UNREADABLE"
"""Reason of samples whose payload is malformed or contradicts the lease. The client and the gateway use other
reasons."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DecodedBatch:
    """The contents of a batch. Every leased sample is either in `samples` or in `unreadable`."""

    samples: list[TrainingSample]
    unreadable: Mapping[str, str]
    """Sample id -> reason for dropping it."""
    groups: tuple[GroupContext, ...]
    traceparents: tuple[str, ...]
    """Contexts of the traced episodes."""


def decode_batch(batch: Batch) -> DecodedBatch:
    """Decode each episode once. Raises `InvalidInput` for a malformed group."""
    episodes: dict[int, Episode | InvalidInput] = {}
    samples, unreadable = [], dict(batch.unreadable)
    for one in batch.samples:
        if id(one.episode) not in episodes:
            episodes[id(one.episode)] = _decode(one.episode)
        episode = episodes[id(one.episode)]
        try:
            if isinstance(episode, InvalidInput):
                raise episode
            samples.append(_training_sample(one.leased, episode))
        except InvalidInput as err:
            unreadable[one.sample_id] = UNREADABLE
            _log.warning("sample is unreadable and will be dropped: id=%s cause=%s", one.sample_id, err.message)
    return DecodedBatch(
        samples,
        unreadable,
        tuple(decode_group_context(g, f"groups[{i}]") for i, g in enumerate(batch.groups)),
        tuple(e.traceparent for e in episodes.values() if isinstance(e, Episode) and e.traceparent),
    )


def _decode(message: types_pb2.Episode) -> Episode | InvalidInput:
    try:
        return decode_episode(message)
    except InvalidInput as err:
        return err


def _training_sample(leased: run_pb2.LeasedSample, episode: Episode) -> TrainingSample:
    meta = leased.meta
    stored_id = leased.replay_of or meta.sample_id
    sample = next((sample for sample in episode.samples if sample.sample_id == stored_id), None)
    if sample is None or sample.leaf != meta.leaf:
        raise InvalidInput(f"episode {episode.key.episode} does not hold sample {stored_id} as it was reported")
    rewards = decode_rewards(meta.rewards)
    segments = episode.path_segments(sample)
    if leased.mask_below_step > 0:
        segments = tuple(_masked(s, policy=sample.policy, below=leased.mask_below_step) for s in segments)
    return TrainingSample(
        sample=replace(sample, sample_id=meta.sample_id, rewards=rewards, trainable=meta.trainable),
        segments=segments,
        group=leased.group,
        task=leased.task,
        episode=episode.key.episode,
        staleness=None if leased.staleness < 0 else leased.staleness,
        sampling_params=episode.sampling_params,
        indices=episode.path(sample.leaf),
    )


def _masked(segment: Segment, *, policy: str, below: int) -> Segment:
    """Remove the loss if `policy` sampled the segment at a step below `below`. The bound concerns only the policy's own
    tokens."""
    version = segment.version
    if segment.source is not Source.POLICY or version is None or version.policy != policy or version.step >= below:
        return segment
    return replace(segment, loss_mask=np.zeros(segment.num_tokens, np.uint8))
