"""Episodes, samples and groups: domain (`rollmesh.shared.domain.trajectory`) to protobuf (`rollmesh/v1/types.proto`)
and back. Measurements on groups are in `events.proto`.

Both directions apply the rules of `codec.checks` and raise `InvalidInput` naming the field. Bytes are deterministic.
The golden vectors of the tests hold for every release, so that one release reads the payloads of another.

An empty array of a segment without tokens equals an absent one, and decodes to the form that its source requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec
from google.protobuf.message import DecodeError

from rollmesh.shared.codec import checks
from rollmesh.shared.codec.arrays import (
    decode_array,
    decode_floats,
    decode_ints,
    decode_mask,
    encode_array,
    encode_floats,
    encode_ints,
    encode_mask,
)
from rollmesh.shared.codec.summaries import sample_summary, why_invalid_summary
from rollmesh.shared.domain.trajectory import (
    SAMPLED_SOURCES,
    TRAINED_MEASURES,
    ClientChains,
    EndpointUse,
    Episode,
    EpisodeKey,
    FinishReason,
    GroupContext,
    MemberOutcome,
    Message,
    Outcome,
    Purpose,
    Reward,
    Role,
    Sample,
    SampleSummary,
    SamplingParams,
    Segment,
    Source,
    ToolOutcome,
    TrainedGroup,
    TurnSummary,
)
from rollmesh.shared.domain.versions import DEFAULT_POLICY, PolicyVersion
from rollmesh.shared.errors import Phrase, field_error
from rollmesh.v1 import events_pb2, types_pb2

E = TypeVar("E", bound=IntEnum)
_MEMBERS: dict[type[IntEnum], dict[int, IntEnum]] = {
    kind: {int(member): member for member in kind} for kind in (FinishReason, Outcome, Purpose, Role, Source)
}
"""Members by number. A call of the class costs twice as much."""


# Episodes -------------------------------------------------------------------------------------------------------------


def episode_to_bytes(episode: Episode) -> bytes:
    """Encode the payload of the sample stream. Raises `InvalidInput` for a malformed episode."""
    return encode_episode(episode).SerializeToString(deterministic=True)


def episode_from_bytes(data: bytes) -> Episode:
    """Decode the episode in a payload. Raises `InvalidInput`."""
    message = types_pb2.Episode()
    try:
        message.ParseFromString(data)
    except DecodeError as err:
        got = Phrase(f"{len(data)} bytes that cannot be decoded ({err})")
        raise field_error("episode", "be an encoded rollmesh.v1.Episode", got) from err
    return decode_episode(message)


def encode_episode(episode: Episode, segments: Sequence[types_pb2.Segment] | None = None) -> types_pb2.Episode:
    """Raises `InvalidInput`. `segments` are the messages of the episode's segments, if they were encoded before."""
    checks.check_episode(episode)
    message = types_pb2.Episode(
        key=encode_key(episode.key),
        purpose=wire(episode.purpose),
        segments=[encode_segment(s) for s in episode.segments] if segments is None else segments,
        sampling_params=[encode_sampling_params(p) for p in episode.sampling_params],
        samples=[encode_sample(s) for s in episode.samples],
        traceparent=episode.traceparent,
        endpoints=map(encode_use, episode.endpoints),
        chains=None if episode.chains is None else types_pb2.ClientChains(**msgspec.structs.asdict(episode.chains)),
        variant=episode.variant,
    )
    for stage, seconds in episode.stage_s.items():
        message.stage_s[stage] = seconds  # a map in the constructor costs several times as much
    return message


def decode_episode(message: types_pb2.Episode, field: str = "episode") -> Episode:
    """Raises `InvalidInput`."""
    episode = Episode(
        key=decode_key(message.key, f"{field}.key"),
        purpose=_known(Purpose, message.purpose, field, "purpose"),
        segments=tuple(decode_segment(s, f"{field}.segments[{i}]") for i, s in enumerate(message.segments)),
        sampling_params=tuple(
            decode_sampling_params(p, f"{field}.sampling_params[{i}]") for i, p in enumerate(message.sampling_params)
        ),
        samples=tuple(decode_sample(s, f"{field}.samples[{i}]") for i, s in enumerate(message.samples)),
        stage_s=dict(message.stage_s),
        traceparent=message.traceparent,
        endpoints=tuple(map(decode_use, message.endpoints)),
        chains=_decode_chains(message.chains) if message.HasField("chains") else None,
        variant=message.variant,
    )
    checks.check_episode(episode, field)
    return episode


def encode_use(use: EndpointUse) -> types_pb2.EndpointUse:
    return types_pb2.EndpointUse(**msgspec.structs.asdict(use))


def decode_use(message: types_pb2.EndpointUse) -> EndpointUse:
    return EndpointUse(**{name: getattr(message, name) for name in EndpointUse.__struct_fields__})


def _decode_chains(message: types_pb2.ClientChains) -> ClientChains:
    return ClientChains(
        begun=dict(message.begun),
        continued=message.continued,
        forks=message.forks,
        reencoded_tokens=message.reencoded_tokens,
    )


def encode_key(key: EpisodeKey) -> types_pb2.EpisodeKey:
    return types_pb2.EpisodeKey(run=key.run, task=key.task, group=key.group, episode=key.episode, attempt=key.attempt)


def decode_key(message: types_pb2.EpisodeKey, field: str = "key") -> EpisodeKey:
    """Raises `InvalidInput` for an attempt below 1; names are checked with the episode."""
    if message.attempt < 1:
        raise field_error(f"{field}.attempt", "be >= 1", message.attempt)
    return EpisodeKey(
        run=message.run, task=message.task, group=message.group, episode=message.episode, attempt=message.attempt
    )


# Segments -------------------------------------------------------------------------------------------------------------


def encode_segment(segment: Segment) -> types_pb2.Segment:
    logprobs, logprobs_model, loss_mask = segment.logprobs, segment.logprobs_model, segment.loss_mask
    # An empty field equals an absent one.
    message = types_pb2.Segment(
        parent=segment.parent,
        role=wire(segment.role),
        source=wire(segment.source),
        token_ids=encode_ints(segment.token_ids),
        logprobs=b"" if logprobs is None else encode_floats(logprobs),
        logprobs_model=b"" if logprobs_model is None else encode_floats(logprobs_model),
        loss_mask=b"" if loss_mask is None else encode_mask(loss_mask),
        sampling=segment.sampling,
        finish=wire(segment.finish),
        messages=[types_pb2.Message(role=m.role, content=m.content) for m in segment.messages],
    )
    for name, values in segment.arrays.items():
        message.arrays[name].CopyFrom(encode_array(values, f"arrays[{name}]"))
    if (version := segment.version) is not None:
        stamp = message.version
        stamp.policy, stamp.step, stamp.weights_digest = version.policy, version.step, version.weights_digest
        if version.incarnation:
            stamp.incarnation = version.incarnation
        message.kv_step_oldest = segment.kv_step_oldest or 0
    if (tool := segment.tool) is not None:
        message.tool.CopyFrom(types_pb2.ToolOutcome(name=tool.name, ok=tool.ok, error=tool.error, wall_s=tool.wall_s))
    return message


def decode_segment(message: types_pb2.Segment, field: str = "segment") -> Segment:
    """Check shapes and enums only; `checks.check_segment` compares it with its episode. Raises `InvalidInput`."""
    if message.media:  # rejected, not dropped, because the sender relies on it
        raise field_error(f"{field}.media", "be empty, because this version does not support it", len(message.media))
    source = _known(Source, message.source, field, "source")
    token_ids, logprobs, logprobs_model = message.token_ids, message.logprobs, message.logprobs_model
    has_logprobs = bool(logprobs) or (source in SAMPLED_SOURCES and not token_ids)
    has_version, kv_step_oldest = message.HasField("version"), message.kv_step_oldest
    if kv_step_oldest and not has_version:
        raise field_error(f"{field}.kv_step_oldest", "be set exactly where `version` is", kv_step_oldest)
    return Segment(
        parent=message.parent,
        role=_known(Role, message.role, field, "role"),
        source=source,
        token_ids=decode_ints(token_ids, field, "token_ids"),
        logprobs=decode_floats(logprobs, field, "logprobs") if has_logprobs else None,
        logprobs_model=decode_floats(logprobs_model, field, "logprobs_model") if logprobs_model else None,
        loss_mask=decode_mask(message.loss_mask) if message.loss_mask else None,
        version=decode_version(message.version, field, "version") if has_version else None,
        kv_step_oldest=kv_step_oldest if has_version else None,
        sampling=message.sampling,
        finish=_known(FinishReason, message.finish, field, "finish"),
        arrays=(
            {name: decode_array(a, f"{field}.arrays[{name[:80]}]") for name, a in message.arrays.items()}
            if message.arrays
            else {}
        ),
        messages=tuple([Message(role=m.role, content=m.content) for m in message.messages]),
        tool=_tool(message.tool) if message.HasField("tool") else None,
    )


def _tool(message: types_pb2.ToolOutcome) -> ToolOutcome:
    return ToolOutcome(name=message.name, ok=message.ok, error=message.error, wall_s=message.wall_s)


def encode_version(version: PolicyVersion) -> types_pb2.PolicyVersion:
    return types_pb2.PolicyVersion(
        policy=version.policy,
        step=version.step,
        incarnation=version.incarnation,
        weights_digest=version.weights_digest,
    )


def decode_version(message: types_pb2.PolicyVersion, field: str = "version", name: str = "") -> PolicyVersion:
    """Raises `InvalidInput` for a negative step or incarnation. `field`, or its part `name`, holds the message."""
    version = _version(message.policy or DEFAULT_POLICY, message.step, message.incarnation, message.weights_digest)
    checks.check_version(version, field, name)
    return version


@lru_cache(maxsize=1024)
def _version(policy: str, step: int, incarnation: int, weights_digest: str) -> PolicyVersion:
    """Return one object per version, because every segment has one of a few."""
    return PolicyVersion(policy=policy, step=step, incarnation=incarnation, weights_digest=weights_digest)


def encode_sampling_params(params: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        seed=params.seed,
    )


def decode_sampling_params(message: types_pb2.SamplingParams, field: str = "params") -> SamplingParams:
    """Raises `InvalidInput`. Temperature and top_p are float32 on the wire."""
    params = SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        max_tokens=message.max_tokens,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        seed=message.seed,
    )
    checks.check_sampling_params(params, field)
    return params


# Samples, rewards, groups ---------------------------------------------------------------------------------------------


def encode_sample(sample: Sample) -> types_pb2.Sample:
    return types_pb2.Sample(
        sample_id=sample.sample_id,
        leaf=sample.leaf,
        role=sample.role,
        policy=sample.policy,
        rewards=encode_rewards(sample.rewards),
        weight=sample.weight,
        trainable=sample.trainable,
        finish=wire(sample.finish),
    )


def decode_sample(message: types_pb2.Sample, field: str = "sample") -> Sample:
    """Check enums only; `checks.check_sample` compares it with its episode. Raises `InvalidInput`."""
    return Sample(
        sample_id=message.sample_id,
        leaf=message.leaf,
        role=message.role,
        policy=message.policy or DEFAULT_POLICY,
        rewards=_rewards(message.rewards, f"{field}.rewards"),
        weight=message.weight,
        trainable=message.trainable,
        finish=_known(FinishReason, message.finish, field, "finish"),
    )


def encode_rewards(rewards: Iterable[Reward]) -> list[types_pb2.Reward]:
    return [
        types_pb2.Reward(
            name=r.name,
            value=r.value,
            segment=r.segment,
            scorer=r.scorer,
            evidence=r.evidence,
            outcome=wire(r.outcome),
            answer=r.answer,
        )
        for r in rewards
    ]


def decode_rewards(messages: Iterable[types_pb2.Reward], field: str = "rewards") -> tuple[Reward, ...]:
    """Raises `InvalidInput`."""
    rewards = _rewards(messages, field)
    checks.check_rewards(rewards, field)
    return rewards


def encode_summary(summary: SampleSummary) -> types_pb2.SampleSummary:
    turns = [
        types_pb2.TurnSummary(
            segment=t.segment, num_tokens=t.num_tokens, mean_logprob=t.mean_logprob, observation=t.observation
        )
        for t in summary.turns
    ]
    return types_pb2.SampleSummary(
        role=summary.role,
        finish=wire(summary.finish),
        turns=turns,
        text=summary.text,
        greedy=summary.greedy,
        variant=summary.variant,
    )


def decode_summary(message: types_pb2.SampleSummary, field: str = "summary") -> SampleSummary:
    """Raises `InvalidInput`."""
    if found := why_invalid_summary(message):
        name, must, got = found
        raise field_error(f"{field}.{name}", must, got)
    turns = tuple(
        TurnSummary(segment=t.segment, num_tokens=t.num_tokens, mean_logprob=t.mean_logprob, observation=t.observation)
        for t in message.turns
    )
    finish = _known(FinishReason, message.finish, field, "finish")
    return SampleSummary(
        role=message.role,
        finish=finish,
        turns=turns,
        text=message.text,
        greedy=message.greedy,
        variant=message.variant,
    )


def summary_of(episode: Episode, sample: Sample, *, text_chars: int = 0) -> SampleSummary:
    """Return the summary of a sample, with at most `text_chars` characters of text, as a rollout worker reports it."""
    message = types_pb2.Episode(
        segments=[encode_segment(segment) for segment in episode.segments],
        sampling_params=[encode_sampling_params(params) for params in episode.sampling_params],
        variant=episode.variant,
    )
    path = [(index, one := message.segments[index], one.token_ids) for index in episode.path(sample.leaf)]
    return decode_summary(sample_summary(message, encode_sample(sample), path, text_chars=text_chars))


def encode_group_context(group: GroupContext) -> types_pb2.GroupContext:
    """Raises `InvalidInput`."""
    checks.check_group_context(group)
    members = [
        types_pb2.MemberOutcome(
            sample_id=m.sample_id,
            rewards=encode_rewards(m.rewards),
            end=m.end,
            episode=m.episode,
            summary=encode_summary(m.summary),
        )
        for m in group.members
    ]
    return types_pb2.GroupContext(
        group=group.group, task=group.task, members=members, labels=group.labels, propensity=group.propensity
    )


def decode_group_context(message: types_pb2.GroupContext, field: str = "group") -> GroupContext:
    """Raises `InvalidInput`."""
    members = tuple(
        MemberOutcome(
            sample_id=m.sample_id,
            rewards=_rewards(m.rewards, f"{field}.members[{i}].rewards"),
            end=m.end,
            episode=m.episode,
            summary=decode_summary(m.summary, f"{field}.members[{i}].summary"),
        )
        for i, m in enumerate(message.members)
    )
    group = GroupContext(
        group=message.group,
        task=message.task,
        members=members,
        labels=dict(message.labels),
        propensity=message.propensity,
    )
    checks.check_group_context(group, field)
    return group


def encode_trained_group(trained: TrainedGroup) -> events_pb2.TrainedGroup:
    """The fields beside the map are for readers of the release before it."""
    return events_pb2.TrainedGroup(
        group=trained.group,
        mean_abs_advantage=trained.mean_abs_advantage,
        policy_loss=trained.policy_loss,
        num_tokens=trained.num_tokens,
        measures=trained.measures,
    )


def decode_trained_group(message: events_pb2.TrainedGroup) -> TrainedGroup:
    """A message without measures is of a trainer or a ledger before the map: its fields are taken."""
    fields = {name: float(getattr(message, name)) for name in TRAINED_MEASURES}
    return TrainedGroup(group=message.group, measures=dict(message.measures) or fields)


# Enums ----------------------------------------------------------------------------------------------------------------


def wire(value: IntEnum) -> Any:
    # The generated stubs have a separate type per enum. A test checks that the numbers are equal.
    return int(value)


def _known(type_: type[E], number: int, field: str, name: str) -> E:
    """Return the member with this number. Raises `InvalidInput` for part `name` of `field`."""
    if (member := _MEMBERS[type_].get(number)) is None:
        names = ", ".join(f"{known.value} {known.name}" for known in type_)
        raise field_error(f"{field}.{name}", f"be one of {names}", number)
    return cast(E, member)


def _rewards(messages: Iterable[types_pb2.Reward], field: str) -> tuple[Reward, ...]:
    return tuple(
        Reward(
            name=m.name,
            value=m.value,
            segment=m.segment,
            scorer=m.scorer,
            evidence=m.evidence,
            outcome=_known(Outcome, m.outcome, f"{field}[{i}]", "outcome"),
            answer=m.answer,
        )
        for i, m in enumerate(messages)
    )
