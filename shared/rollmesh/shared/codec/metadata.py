"""Metadata of a sample, and its comparison with the stored payload.

The coordinator judges the staleness bound by `SampleMeta.steps`, which a rollout worker reported. The stamps in the
payload decide, because the engine wrote them: every reader that has a payload calls `check_leased` before it trains on
the tokens. The worker builds its report with `sample_meta`, so both sides count in the same way. Works on messages,
because the gateway does not decode payloads. docs/staleness.md has a table of the fields.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollmesh.shared.codec.summaries import sample_summary
from rollmesh.shared.domain.versions import DEFAULT_POLICY
from rollmesh.shared.errors import MetadataMismatch
from rollmesh.v1 import run_pb2, types_pb2

_TOKEN_BYTES = 4


def sample_meta(episode: types_pb2.Episode, sample: types_pb2.Sample, *, text_chars: int = 0) -> types_pb2.SampleMeta:
    """Return what the coordinator needs of a sample: above all, which weights sampled how many of its trainable tokens.
    `text_chars` is the maximum length of the text in its summary.

    Raises `MetadataMismatch` for a sample whose path cannot be trained on. A trainable one trains no POLICY token of
    another policy.
    """
    policy = sample.policy or DEFAULT_POLICY
    tokens: dict[tuple[int, int], int] = {}
    external: dict[types_pb2.SegmentSource.ValueType, int] = {}
    num_tokens = num_sampled = 0
    shared = _indices_before(episode, sample)
    path = _path(episode, sample)
    for index, segment, token_ids in reversed(path):
        num_here = len(token_ids) // _TOKEN_BYTES
        num_tokens += num_here
        is_policy = segment.source == types_pb2.SEGMENT_SOURCE_POLICY
        if is_policy and index not in shared:
            num_sampled += num_here
        loss_mask = segment.loss_mask
        num_trainable = len(loss_mask) - loss_mask.count(0)
        if not num_trainable:
            continue
        if not is_policy:
            external[segment.source] = external.get(segment.source, 0) + num_trainable
            continue
        if problem := _stamp_problem(segment):
            raise _mismatch(sample.sample_id, f"segment {index} is trainable, of source POLICY, and {problem}")
        version = segment.version
        if (version.policy or DEFAULT_POLICY) == policy:
            weights = (version.step, version.incarnation)
            tokens[weights] = tokens.get(weights, 0) + num_trainable
        elif sample.trainable:
            what = (
                f"segment {index} trains {num_trainable} tokens of policy {version.policy!r}, expected policy "
                f"{policy!r}"
            )
            raise _mismatch(sample.sample_id, what)
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
        external=[types_pb2.ExternalSpan(source=source, num_tokens=external[source]) for source in sorted(external)],
    )


def check_leased(episode: types_pb2.Episode, leased: run_pb2.LeasedSample) -> None:
    """Compare a leased sample with its payload. Raises `MetadataMismatch`, which names the first field that differs.

    Rewards are compared unless the finalizer may have replaced them. A replayed sample has the payload of its original,
    so everything but its id must agree with the original.
    """
    check_key(episode, leased.key)
    sample = check_metadata(episode, leased.meta, leased.replay_of)
    if leased.rewards_as_reported and (reported := _rewards(leased.meta.rewards)) != (
        stored := _rewards(sample.rewards)
    ):
        raise _differs(leased.meta, "rewards", reported, stored)


def check_key(episode: types_pb2.Episode, key: types_pb2.EpisodeKey) -> None:
    """Compare the key of a payload with the one that it must have. Absent fields are not compared. Raises
    `MetadataMismatch`."""
    for name in ("run", "episode", "attempt", "group", "task"):
        expected, stored = getattr(key, name), getattr(episode.key, name)
        if expected and expected != stored:
            raise MetadataMismatch(
                f"the payload of episode {key.episode!r} has the key of another: `{name}` must be {expected!r}, got "
                f"{stored!r}; drop its samples"
            )


def check_metadata(episode: types_pb2.Episode, meta: types_pb2.SampleMeta, stored_id: str = "") -> types_pb2.Sample:
    """Compare reported metadata without rewards with the payload, and return the sample there. `stored_id`: its id in
    the payload if it is another one. Raises `MetadataMismatch`, as above."""
    stored_id = stored_id or meta.sample_id
    found = [one for one in episode.samples if one.sample_id == stored_id]
    if len(found) != 1:
        what = "does not hold" if not found else f"has {len(found)} entries for"
        raise _mismatch(meta.sample_id, f"the payload of episode {episode.key.episode!r} {what} sample {stored_id}")
    sample = found[0]
    stamped = sample_meta(episode, sample, text_chars=len(meta.summary.text))
    for name, reported, stored in (
        ("policy", meta.policy or DEFAULT_POLICY, stamped.policy),
        ("leaf", meta.leaf, stamped.leaf),
        ("trainable", meta.trainable, stamped.trainable),
        ("steps", _spans(meta), _spans(stamped)),
        ("external", _external(meta), _external(stamped)),
        ("num_tokens", meta.num_tokens, stamped.num_tokens),
        # The next one is absent from reports of older workers and in older ledgers, as the summary is. The bound does
        # not depend on them.
        ("num_sampled_tokens", meta.num_sampled_tokens or stamped.num_sampled_tokens, stamped.num_sampled_tokens),
    ):
        if reported != stored:
            raise _differs(meta, name, reported, stored)
    summary = stamped.summary if meta.summary.ByteSize() else meta.summary
    # Equal fields in different messages: a newer worker reports further ones.
    if meta.summary != summary and (fields := _summary(meta.summary)) != (stored_fields := _summary(summary)):
        raise _differs(meta, "summary", fields, stored_fields)
    return sample


def _stamp_problem(segment: types_pb2.Segment) -> str:
    """Return what no engine can have stamped on a sampled segment; empty if nothing. After a roll-back, keys may be of
    an undone step above that of the weights."""
    version, oldest = segment.version, segment.kv_step_oldest
    if not segment.HasField("version"):
        return "has no version"
    if oldest < 0 or (oldest > version.step and not version.incarnation):
        return f"has `kv_step_oldest` {oldest}, expected a step in [0, {version.step}], which sampled it"
    return ""


def _indices_before(episode: types_pb2.Episode, sample: types_pb2.Sample) -> set[int]:
    """Return the segments on the paths of the samples before `sample`. Paths that are not valid count as far as they
    go."""
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


def _external(meta: types_pb2.SampleMeta) -> list[tuple[int, int]]:
    return sorted((span.source, span.num_tokens) for span in meta.external)


def _rewards(rewards: Iterable[types_pb2.Reward]) -> list[tuple[str, int, int, float]]:
    """Return what counts of rewards. The value of one whose outcome is not OK does not."""
    ok = types_pb2.REWARD_OUTCOME_OK
    return [(r.name, r.segment, r.outcome, r.value if r.outcome == ok else 0.0) for r in rewards]


def _summary(summary: types_pb2.SampleSummary) -> list[object]:
    """Return the fields for a comparison; empty for a summary without content."""
    if not summary.ByteSize():
        return []
    turns = [(turn.segment, turn.num_tokens, turn.mean_logprob, turn.observation) for turn in summary.turns]
    return [summary.role, summary.variant, int(summary.finish), summary.greedy, summary.text, turns]


def _differs(meta: types_pb2.SampleMeta, name: str, reported: object, stored: object) -> MetadataMismatch:
    return _mismatch(meta.sample_id, f"`{name}` was reported as {reported}, the payload has {stored}")


def _mismatch(sample_id: str, what: str) -> MetadataMismatch:
    return MetadataMismatch(
        f"metadata and payload of sample {sample_id} contradict each other: {what}; drop the sample",
        sample_id=sample_id,
    )
