"""Reports that the coordinator accepts, although they contradict the payload. No reader may deliver such a sample.

A lie changes the report or the payload of the newest sample of an episode, and returns whether the two differ
afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from rollmesh.v1 import types_pb2

Version = tuple[int, int]
Lie = Callable[[random.Random, Sequence[Version], types_pb2.Episode, types_pb2.SampleMeta], bool]
POLICY = types_pb2.SEGMENT_SOURCE_POLICY
EXTERNAL = (
    types_pb2.SEGMENT_SOURCE_DATASET,
    types_pb2.SEGMENT_SOURCE_REPLAY,
    types_pb2.SEGMENT_SOURCE_PEER,
    types_pb2.SEGMENT_SOURCE_HUMAN,
)
KEY = ("run", "task", "group", "episode", "attempt")


def sampled(episode: types_pb2.Episode) -> Iterator[types_pb2.Segment]:
    """Yield the segments of the newest sample that a policy sampled."""
    index = episode.samples[-1].leaf
    while index >= 0:
        if episode.segments[index].source == POLICY:
            yield episode.segments[index]
        index = episode.segments[index].parent


def other_key(rng: random.Random, key: types_pb2.EpisodeKey) -> None:
    """Make the key that of another episode, attempt or run."""
    name = rng.choice(KEY)
    setattr(key, name, 9 if name == "attempt" else f"other-{name}")


def _newest_step(
    _: random.Random, versions: Sequence[Version], __: types_pb2.Episode, meta: types_pb2.SampleMeta
) -> bool:
    """Report all tokens as those of the newest weights, or one more of them."""
    (step, incarnation), num = versions[-1], sum(span.num_tokens for span in meta.steps)
    newest = [(span.step, span.incarnation) for span in meta.steps] == [versions[-1]]
    del meta.steps[:]
    meta.steps.add(step=step, incarnation=incarnation, num_tokens=num + (newest or not num))
    return True


def _mixed_steps(
    rng: random.Random, versions: Sequence[Version], _: types_pb2.Episode, meta: types_pb2.SampleMeta
) -> bool:
    """Report one span as that of another version."""
    free = sorted(set(versions) - {(span.step, span.incarnation) for span in meta.steps})
    if not free or not meta.steps:
        return False
    meta.steps[0].step, meta.steps[0].incarnation = rng.choice(free)
    return True


def _no_steps(_: random.Random, __: Sequence[Version], ___: types_pb2.Episode, meta: types_pb2.SampleMeta) -> bool:
    differs = bool(meta.steps)
    del meta.steps[:]
    return differs


def _other_policy(
    _: random.Random, __: Sequence[Version], episode: types_pb2.Episode, meta: types_pb2.SampleMeta
) -> bool:
    """Stamp tokens with another policy, which has no bound."""
    for segment in sampled(episode):
        segment.version.policy = "other"
    del meta.steps[:]
    return any(sampled(episode))


def _other_source(
    rng: random.Random, _: Sequence[Version], episode: types_pb2.Episode, meta: types_pb2.SampleMeta
) -> bool:
    """Give tokens another source, which has no bound."""
    segments = list(sampled(episode))
    for segment in segments:
        segment.source = rng.choice(EXTERNAL)
    del meta.steps[:]
    meta.num_sampled_tokens = 0
    return bool(segments)


def _rewards(rng: random.Random, _: Sequence[Version], episode: types_pb2.Episode, __: types_pb2.SampleMeta) -> bool:
    reward = episode.samples[-1].rewards[0]
    if rng.random() < 0.5:
        reward.value += 1.0
    else:
        reward.name = "other"
    return True


def _twice(rng: random.Random, _: Sequence[Version], episode: types_pb2.Episode, __: types_pb2.SampleMeta) -> bool:
    """Store the sample twice, on different leaves."""
    twin = types_pb2.Sample()
    twin.CopyFrom(episode.samples[-1])
    twin.leaf = 0
    episode.samples.insert(rng.randint(0, len(episode.samples)), twin)
    return True


def _kv(rng: random.Random, _: Sequence[Version], episode: types_pb2.Episode, __: types_pb2.SampleMeta) -> bool:
    """Stamp keys that are newer than the weights, which no roll-back explains, or older than any."""
    for segment in sampled(episode):
        segment.kv_step_oldest = -1 if segment.version.incarnation else rng.choice((-1, segment.version.step + 1))
        return True
    return False


def _num_tokens(_: random.Random, __: Sequence[Version], ___: types_pb2.Episode, meta: types_pb2.SampleMeta) -> bool:
    meta.num_tokens += 1
    return True


def _num_sampled(_: random.Random, __: Sequence[Version], ___: types_pb2.Episode, meta: types_pb2.SampleMeta) -> bool:
    meta.num_sampled_tokens += 1
    return True


def _leaf(_: random.Random, __: Sequence[Version], ___: types_pb2.Episode, meta: types_pb2.SampleMeta) -> bool:
    meta.leaf += 1
    return True


def _trainable(_: random.Random, __: Sequence[Version], episode: types_pb2.Episode, meta: types_pb2.SampleMeta) -> bool:
    episode.samples[-1].trainable = not meta.trainable
    return True


LIES: Sequence[Lie] = (
    _newest_step,
    _mixed_steps,
    _no_steps,
    _other_policy,
    _other_source,
    _rewards,
    _twice,
    _kv,
    _num_tokens,
    _num_sampled,
    _leaf,
    _trainable,
)
