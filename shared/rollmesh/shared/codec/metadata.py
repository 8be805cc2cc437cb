"""Metadata of a sample, and its comparison with the stored payload.

The coordinator judges the staleness bound by `SampleMeta.steps`, which a rollout worker reported. The stamps in the payload decide,
because the engine wrote them: every reader that has a payload calls `check_metadata` before it trains on the tokens. The worker
builds its report with `sample_meta`, so both sides count in the same way. Works on messages, because the gateway does not decode payloads.
"""

from __future__ import annotations

from rollmesh.shared.codec.summaries import sample_summary
from rollmesh.shared.errors import MetadataMismatch
from rollmesh.v1 import types_pb2

DEFAULT_POLICY = "main"
_TOKEN_BYTES = 4


def sample_meta(episode: types_pb2.Episode, sample: types_pb2.Sample, *, text_chars: int = 0) -> types_pb2.SampleMeta:
    """Return what the coordinator needs of a sample: above all, which weights sampled how many of its trainable tokens. `text_chars` is
    the maximum length of the text in its summary.

    Raises `MetadataMismatch` for a sample whose path cannot be trained on.
    """
    policy = sample.policy or DEFAULT_POLICY
    tokens: dict[tuple[int, int], int] = {}
    num_tokens = num_sampled = 0
    shared = _indices_before(episode, sample)
    path = _path(episode, sample)
    for index, segment, token_ids in reversed(path):
        num_here = len(token_ids) // _TOKEN_BYTES
        num_tokens += num_here
        if segment.source != types_pb2.SEGMENT_SOURCE_POLICY:
            continue
        if index not in shared:
            num_sampled += num_here
        loss_mask = segment.loss_mask
        num_trainable = len(loss_mask) - loss_mask.count(0)
        if not num_trainable:
            continue
        if not segment.HasField("version"):
            raise _mismatch(sample.sample_id, "a trainable POLICY segment has no version")
        version = segment.version
        if (version.policy or DEFAULT_POLICY) == policy:
            weights = (version.step, version.incarnation)
            tokens[weights] = tokens.get(weights, 0) + num_trainable
    return types_pb2.SampleMeta(
        sample_id=sample.sample_id,
        policy=policy,
        leaf=sample.leaf,
        steps=[
            types_pb2.StepSpan(step=step, incarnation=incarnation, num_tokens=tokens[step, incarnation])
            for step, incarnation in sorted(tokens)
        ],
        num_tokens=num_tokens,
        rewards=sample.rewards,
        trainable=sample.trainable,
        num_sampled_tokens=num_sampled,
        summary=sample_summary(episode, sample, path, text_chars=text_chars),
    )


def check_metadata(episode: types_pb2.Episode, meta: types_pb2.SampleMeta) -> None:
    """Compare reported metadata with the payload. Raises `MetadataMismatch`, which names the first field that differs.

    Rewards are not compared: the finalizer may change them after the payload was stored.
    """
    sample = next((one for one in episode.samples if one.sample_id == meta.sample_id), None)
    if sample is None:
        raise _mismatch(
            meta.sample_id, f"the payload of episode {episode.key.episode!r} does not hold sample {meta.sample_id}"
        )
    stamped = sample_meta(episode, sample, text_chars=len(meta.summary.text))
    for name, reported, stored in (
        ("policy", meta.policy or DEFAULT_POLICY, stamped.policy),
        ("leaf", meta.leaf, stamped.leaf),
        ("trainable", meta.trainable, stamped.trainable),
        ("steps", _spans(meta), _spans(stamped)),
        ("num_tokens", meta.num_tokens, stamped.num_tokens),
        # The next one is absent from reports of older workers and in older ledgers, as the summary is. The bound does not depend on them.
        ("num_sampled_tokens", meta.num_sampled_tokens or stamped.num_sampled_tokens, stamped.num_sampled_tokens),
    ):
        if reported != stored:
            raise _differs(meta, name, reported, stored)
    summary = stamped.summary if meta.summary.ByteSize() else meta.summary
    # Equal fields in different messages: a newer worker reports further ones.
    if meta.summary != summary and (fields := _summary(meta.summary)) != (stored_fields := _summary(summary)):
        raise _differs(meta, "summary", fields, stored_fields)


def _indices_before(episode: types_pb2.Episode, sample: types_pb2.Sample) -> set[int]:
    """Return the segments on the paths of the samples before `sample`. Paths that are not valid count as far as they go."""
    found: set[int] = set()
    for one in episode.samples:
        if one.sample_id == sample.sample_id:
            break
        index = one.leaf
        while 0 <= index < len(episode.segments) and index not in found:
            found.add(index)
            index = episode.segments[index].parent
    return found


def _path(episode: types_pb2.Episode, sample: types_pb2.Sample) -> list[tuple[int, types_pb2.Segment, bytes]]:
    """Return the segments with their indices and token ids, from the root to the leaf."""
    segments = episode.segments
    path = []
    index, above = sample.leaf, len(segments)
    while index != -1:
        if not 0 <= index < above:
            raise _mismatch(sample.sample_id, f"its path has segment {index}, expected one in [0, {above})")
        segment = segments[index]
        token_ids = segment.token_ids
        num_bytes, num_masked = len(token_ids), len(segment.loss_mask)
        if num_bytes % _TOKEN_BYTES:
            raise _mismatch(sample.sample_id, f"segment {index} has {num_bytes} bytes of token ids")
        if num_masked and num_masked != num_bytes // _TOKEN_BYTES:
            raise _mismatch(sample.sample_id, f"the loss mask of segment {index} does not have one value per token")
        path.append((index, segment, token_ids))
        index, above = segment.parent, index
    path.reverse()
    return path


def _spans(meta: types_pb2.SampleMeta) -> list[tuple[int, int, int]]:
    return sorted((span.step, span.incarnation, span.num_tokens) for span in meta.steps)


def _summary(summary: types_pb2.SampleSummary) -> list[object]:
    """Return the fields for a comparison; empty for a summary without content."""
    if not summary.ByteSize():
        return []
    turns = [(turn.segment, turn.num_tokens, turn.mean_logprob, turn.observation) for turn in summary.turns]
    return [summary.role, int(summary.finish), summary.greedy, summary.text, turns]


def _differs(meta: types_pb2.SampleMeta, name: str, reported: object, stored: object) -> MetadataMismatch:
    return _mismatch(meta.sample_id, f"`{name}` was reported as {reported}, the payload has {stored}")


def _mismatch(sample_id: str, what: str) -> MetadataMismatch:
    return MetadataMismatch(
        f"metadata and payload of sample {sample_id} contradict each other: {what}; drop the sample",
        sample_id=sample_id,
    )
