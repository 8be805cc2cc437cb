"""Episodes survive the wire unchanged, their bytes hold over releases, and malformed ones are refused by field."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hypothesis_numpy
from numpy.typing import NDArray

from rollmesh.shared.codec import trajectory as codec
from rollmesh.shared.domain import trajectory as domain
from rollmesh.shared.domain.reward_range import REWARD_ABS_MAX
from rollmesh.shared.domain.trajectory import oldest_kv_step
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import InvalidInput
from rollmesh.v1 import types_pb2

from . import episodes

GOLDEN = Path(__file__).parent / "golden" / "episode.bin"


def equal(a: Any, b: Any) -> bool:
    """Deep equality that looks into arrays, their dtypes included."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(equal(getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


# Round trip and golden bytes ------------------------------------------------------------------------------------------


def test_episode_bytes_equal_the_golden_ones() -> None:
    assert codec.episode_to_bytes(episodes.rich_episode()) == GOLDEN.read_bytes()


def test_golden_bytes_decode_to_the_episode() -> None:
    assert equal(codec.episode_from_bytes(GOLDEN.read_bytes()), episodes.rich_episode())


texts = st.text(max_size=8)
names = st.text(min_size=1, max_size=8)
floats32 = st.floats(-50, 0, width=32)
versions = st.builds(
    PolicyVersion,
    policy=names,
    step=st.integers(0, 2**40),
    incarnation=st.integers(0, 9),
    weights_digest=st.just("cd" * 32),
)
params = st.builds(
    domain.SamplingParams,
    temperature=st.floats(0, 10, width=32),
    top_p=st.floats(0.125, 1, width=32),
    top_k=st.integers(0, 99),
    max_tokens=st.integers(1, 2**20),
    stop=st.lists(names, max_size=2).map(tuple),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=2).map(tuple),
    seed=st.integers(0, 2**64 - 1),
)
rewards = st.lists(
    st.builds(
        domain.Reward,
        name=names,
        value=st.floats(-REWARD_ABS_MAX, REWARD_ABS_MAX),
        scorer=texts,
        evidence=texts,
        outcome=st.sampled_from(domain.Outcome),
    ),
    max_size=3,
).map(tuple)


tools = st.builds(
    lambda error, name, wall_s: domain.ToolOutcome(name=name, ok=not error, error=error, wall_s=wall_s),
    st.sampled_from(["", "TIME_LIMIT", "MALFORMED_CALL"]),
    names,
    st.floats(0, 1e9),
)


@st.composite
def arrays(draw: st.DrawFn, num_tokens: int) -> NDArray[Any]:
    dtype = draw(st.sampled_from([np.float32, np.float16, np.int32, np.uint8]))
    shape = draw(st.sampled_from([(num_tokens,), (num_tokens, 1), (num_tokens, 3)]))
    return draw(
        hypothesis_numpy.arrays(
            dtype,
            shape,
            elements={"allow_nan": False, "allow_infinity": False} if dtype in (np.float32, np.float16) else None,
        )
    )


@st.composite
def segments(draw: st.DrawFn, index: int) -> domain.Segment:
    source = draw(st.sampled_from(domain.Source))
    n = draw(st.integers(1, 5))

    def array(values: st.SearchStrategy[Any], dtype: type) -> Any:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype)

    is_sampled = source in (domain.Source.POLICY, domain.Source.PEER)
    version = draw(versions) if source is domain.Source.POLICY else draw(st.none() | versions)
    return domain.Segment(
        parent=draw(st.integers(-1, index - 1)),
        role=draw(st.sampled_from(domain.Role)),
        source=source,
        token_ids=array(st.integers(0, 2**31 - 1), np.int32),
        logprobs=array(floats32, np.float32) if is_sampled else None,
        logprobs_model=array(floats32, np.float32) if draw(st.booleans()) else None,
        loss_mask=array(st.integers(0, 1), np.uint8) if draw(st.booleans()) else None,
        version=version,
        kv_step_oldest=draw(st.integers(0, version.step)) if version else None,
        sampling=0 if is_sampled else -1,
        finish=draw(st.sampled_from(domain.FinishReason)),
        arrays=draw(st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,7}", fullmatch=True), arrays(n), max_size=3)),
        messages=tuple(domain.Message(role="user", content=c) for c in draw(st.lists(texts, max_size=2))),
        tool=draw(st.none() | tools),
    )


@st.composite
def any_episode(draw: st.DrawFn) -> domain.Episode:
    tree = tuple(draw(segments(i)) for i in range(draw(st.integers(1, 4))))
    leaves = draw(st.lists(st.integers(0, len(tree) - 1), max_size=3))
    return domain.Episode(
        key=domain.EpisodeKey(run=draw(names), task=draw(names), group=draw(names), episode=draw(names)),
        purpose=draw(st.sampled_from(domain.Purpose)),
        segments=tree,
        sampling_params=(draw(params),),
        samples=tuple(
            domain.Sample(sample_id=f"s{i}", leaf=leaf, role=draw(texts), policy=draw(names), rewards=draw(rewards))
            for i, leaf in enumerate(leaves)
        ),
        stage_s=draw(st.dictionaries(names, st.floats(0, 1e6), max_size=2)),
        traceparent=draw(texts),
    )


@given(any_episode())
@settings(max_examples=60, deadline=None)
def test_any_well_formed_episode_survives_the_wire(episode: domain.Episode) -> None:
    assert equal(codec.episode_from_bytes(codec.episode_to_bytes(episode)), episode)


def test_group_context_survives_the_wire() -> None:
    sample = episodes.rich_episode().samples[0]
    group = domain.GroupContext(
        group="g3",
        task="calc-7",
        members=(
            domain.MemberOutcome(
                sample_id="a",
                rewards=(*sample.rewards, domain.Reward(name="math", value=1.0, answer="4/3")),
                end="ready",
                summary=domain.SampleSummary(
                    role="critic",
                    finish=domain.FinishReason.LENGTH,
                    turns=(domain.TurnSummary(segment=3, num_tokens=7, mean_logprob=-0.25, observation="ab" * 8),),
                    text="so 4/3",
                ),
            ),
            domain.MemberOutcome(sample_id="b", rewards=(), end="stale"),
        ),
    )
    assert codec.decode_group_context(codec.encode_group_context(group)) == group


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (domain.Role, types_pb2.SegmentRole, "SEGMENT_ROLE_"),
        (domain.Source, types_pb2.SegmentSource, "SEGMENT_SOURCE_"),
        (domain.FinishReason, types_pb2.FinishReason, "FINISH_REASON_"),
        (domain.Outcome, types_pb2.RewardOutcome, "REWARD_OUTCOME_"),
        (domain.Purpose, types_pb2.Purpose, "PURPOSE_"),
    ],
)
def test_enum_numbers_equal_those_of_the_contract(ours: type[IntEnum], theirs: Any, prefix: str) -> None:
    wire = {name.removeprefix(prefix): number for name, number in theirs.items()}
    unspecified = wire.pop("UNSPECIFIED")
    if ours is domain.FinishReason:  # the one enum whose zero has a meaning
        wire["UNFINISHED"] = unspecified
    assert {member.name: member.value for member in ours} == wire


# Refusals -------------------------------------------------------------------------------------------------------------

NAN = np.array([np.nan] * 3, "<f4").tobytes()
Break = Callable[[types_pb2.Episode], object]


def array_of(episode: types_pb2.Episode, **changes: Any) -> None:
    """Overwrite fields of one array: its original is f32le [2]."""
    values = {"dtype": "f32le", "shape": [2], "inline": bytes(8), **changes}
    if "blob_digest" in changes:
        del values["inline"]
    episode.segments[1].arrays["entropy"].CopyFrom(types_pb2.TokenArray(**values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda e: setattr(e.segments[2], "logprobs", bytes(8)),
            "`episode.segments[2].logprobs` must have 3 values, one per token, got 2",
        ),
        (
            lambda e: setattr(e.segments[2], "loss_mask", bytes(4)),
            "`episode.segments[2].loss_mask` must have 3 values, one per token, got 4",
        ),
        (
            lambda e: setattr(e.segments[2], "loss_mask", b"\0\2\1"),
            "segments[2].loss_mask` must contain only 0 and 1, got 2",
        ),
        (
            lambda e: setattr(e.segments[2], "logprobs_model", bytes(4)),
            "segments[2].logprobs_model` must have 3 values",
        ),
        (
            lambda e: e.segments[3].tool.MergeFrom(types_pb2.ToolOutcome(ok=True, error="TIME_LIMIT")),
            "`episode.segments[3].tool.error` must be empty exactly if `ok` is set, got 'TIME_LIMIT'",
        ),
        (
            lambda e: e.segments[3].tool.MergeFrom(types_pb2.ToolOutcome(ok=True, wall_s=math.nan)),
            "`episode.segments[3].tool.wall_s` must be finite and >= 0, got nan",
        ),
        (
            lambda e: e.segments[3].tool.MergeFrom(types_pb2.ToolOutcome(ok=True, name="x" * 129)),
            "`episode.segments[3].tool.name` must have at most 128 characters, got 129",
        ),
        (lambda e: setattr(e.segments[2], "logprobs", NAN), "segments[2].logprobs[0]` must be finite, got nan"),
        (
            lambda e: setattr(e.segments[0], "token_ids", bytes(7)),
            "segments[0].token_ids` must be a multiple of 4 bytes for i32le, got 7",
        ),
        (lambda e: setattr(e.segments[0], "token_ids", b"\xff" * 4), "segments[0].token_ids` must be >= 0, got -1"),
        (
            lambda e: setattr(e.segments[1], "parent", 1),
            "segments[1].parent` must be -1 (root) or the index of an earlier segment, below 1, got 1",
        ),
        (
            lambda e: setattr(e.segments[1], "parent", -2),
            "segments[1].parent` must be -1 (root) or the index of an earlier segment, below 1, got -2",
        ),
        (lambda e: setattr(e.segments[1], "role", 77), "segments[1].role` must be one of 1 CONTEXT"),
        (lambda e: setattr(e.segments[1], "source", 0), "segments[1].source` must be one of 1 POLICY"),
        (lambda e: setattr(e.segments[1], "finish", 9), "segments[1].finish` must be one of"),
        (
            lambda e: setattr(e.segments[1], "sampling", 1),
            "segments[1].sampling` must be -1 (not sampled) or the index of one of 1 sampling_params, got 1",
        ),
        (
            lambda e: e.segments[1].ClearField("logprobs"),
            "segments[1].logprobs` must be set, because POLICY tokens are sampled, got none",
        ),
        (
            lambda e: setattr(e.segments[0], "logprobs", bytes(12)),
            "segments[0].logprobs` must have no values, because PROMPT",
        ),
        (lambda e: e.segments[1].ClearField("version"), "segments[1].kv_step_oldest` must be set exactly where"),
        (lambda e: setattr(e.segments[1].version, "step", -1), "segments[1].version.step` must be >= 0, got -1"),
        (lambda e: e.segments[1].arrays["new"].SetInParent(), "segments[1].arrays[new].dtype` must be one of f32le"),
        (
            lambda e: array_of(e, dtype="f64le"),
            "segments[1].arrays[entropy].dtype` must be one of f32le, f16le, i32le, u8",
        ),
        (lambda e: array_of(e, shape=[]), "segments[1].arrays[entropy].shape` must be [n] or [n, k], got []"),
        (lambda e: array_of(e, shape=[2, 1, 1]), "segments[1].arrays[entropy].shape` must be [n] or [n, k]"),
        (lambda e: array_of(e, shape=[-2]), "segments[1].arrays[entropy].shape` must be [n] or [n, k], got [-2]"),
        (lambda e: array_of(e, shape=[2**62, 2**62]), "segments[1].arrays[entropy].inline` must have"),
        (
            lambda e: array_of(e, shape=[3], inline=bytes(12)),
            "segments[1].arrays[entropy].shape` must be [2] or [2, k]",
        ),
        (lambda e: array_of(e, shape=[2, 0], inline=b""), "segments[1].arrays[entropy].shape` must be [2] or [2, k]"),
        (lambda e: array_of(e, inline=NAN[:8]), "segments[1].arrays[entropy][0]` must be finite, got nan"),
        (lambda e: array_of(e, blob_digest="ab" * 32), "segments[1].arrays[entropy].blob_digest` must be absent"),
        (
            lambda e: array_of(e, dtype="u8", shape=[2, 2**19 + 1], inline=bytes(2**20 + 2)),
            "segments[1].arrays[entropy]` must have at most 1048576 bytes, got 1048578",
        ),
        (
            lambda e: e.segments[1].arrays["No!"].CopyFrom(e.segments[1].arrays["entropy"]),
            "segments[1].arrays` must have names that match [a-z][a-z0-9_]{0,63}, got 'No!'",
        ),
        (
            lambda e: [e.segments[1].arrays[f"a{i}"].CopyFrom(e.segments[1].arrays["entropy"]) for i in range(15)],
            "segments[1].arrays` must have at most 16 entries, got 17",
        ),
        (lambda e: e.segments[1].media.add(), "segments[1].media` must be empty"),
        (
            lambda e: setattr(e.samples[1], "leaf", 7),
            "episode.samples[1].leaf` must be the index of one of 7 segments, got 7",
        ),
        (
            lambda e: setattr(e.samples[1], "sample_id", "e9.0"),
            "samples[1].sample_id` must be unique in the episode, got 'e9.0'",
        ),
        (
            lambda e: setattr(e.samples[0], "weight", float("inf")),
            "samples[0].weight` must be finite and >= 0, got inf",
        ),
        (
            lambda e: setattr(e.samples[0].rewards[1], "value", float("nan")),
            "samples[0].rewards[1].value` must be in [-1e+30, 1e+30], got nan",
        ),
        (
            lambda e: setattr(e.samples[0].rewards[1], "segment", 7),
            "samples[0].rewards[1].segment` must be -1 (whole sample) or the index of a segment, got 7",
        ),
        (
            lambda e: setattr(e.samples[0].rewards[1], "outcome", 0),
            "samples[0].rewards[1].outcome` must be one of 1 OK",
        ),
        (
            lambda e: setattr(e.sampling_params[0], "temperature", -1),
            "sampling_params[0].temperature` must be in [0, 10], got -1.0",
        ),
        (
            lambda e: setattr(e.sampling_params[0], "max_tokens", 0),
            "sampling_params[0].max_tokens` must be >= 1, got 0",
        ),
        (lambda e: setattr(e, "purpose", 0), "episode.purpose` must be one of 1 TRAIN"),
        (lambda e: setattr(e.key, "run", ""), "episode.key.run` must not be empty, got ''"),
        (lambda e: setattr(e.key, "attempt", 0), "episode.key.attempt` must be >= 1, got 0"),
    ],
)
def test_a_malformed_episode_is_refused_by_field(damage: Break, message: str) -> None:
    wire = codec.encode_episode(episodes.rich_episode())
    damage(wire)
    with pytest.raises(InvalidInput) as caught:
        codec.decode_episode(wire)
    assert message in str(caught.value)
    assert caught.value.violations[0].field in str(caught.value)


def test_bytes_that_are_no_episode_are_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"must be an encoded rollmesh\.v1\.Episode, got 3 bytes that cannot be decoded \("
    ):
        codec.episode_from_bytes(b"\xff\xff\xff")


def test_a_malformed_episode_is_not_even_sent() -> None:
    episode = episodes.rich_episode()
    broken = msgspec.structs.replace(episode.segments[1], logprobs=np.zeros(1, np.float32))
    with pytest.raises(InvalidInput, match=r"segments\[1\]\.logprobs` must have 2 values, one per token, got 1"):
        codec.encode_episode(msgspec.structs.replace(episode, segments=(episode.segments[0], broken)))


def test_the_use_of_endpoints_survives_and_a_negative_number_is_named() -> None:
    use = domain.EndpointUse(
        endpoint="judge",
        caller="agent",
        calls=3,
        replayed=1,
        prompt_tokens=70,
        completion_tokens=9,
        price=0.25,
        latency_s=1.5,
    )
    episode = msgspec.structs.replace(
        episodes.rich_episode(), endpoints=(use, msgspec.structs.replace(use, caller="j@1"))
    )
    assert codec.episode_from_bytes(codec.episode_to_bytes(episode)).endpoints == episode.endpoints
    broken = msgspec.structs.replace(episode, endpoints=(msgspec.structs.replace(use, price=-1.0),))
    with pytest.raises(InvalidInput, match=r"episode.endpoints\[0\].price"):
        codec.episode_to_bytes(broken)


def test_the_conversations_of_clients_survive_and_a_negative_number_is_named() -> None:
    chains = domain.ClientChains(begun={"first": 1, "history": 2}, continued=3, forks=4, reencoded_tokens=50)
    episode = msgspec.structs.replace(episodes.rich_episode(), chains=chains)
    assert codec.episode_from_bytes(codec.episode_to_bytes(episode)).chains == chains
    assert codec.episode_from_bytes(codec.episode_to_bytes(episodes.rich_episode())).chains is None
    for broken, field in (({**chains.begun, "tools": -1}, r"begun\[tools\]"), (chains.begun, "forks")):
        wrong = msgspec.structs.replace(chains, begun=broken, forks=-1)
        with pytest.raises(InvalidInput, match=rf"episode.chains.{field}"):
            codec.episode_to_bytes(msgspec.structs.replace(episode, chains=wrong))


def test_the_oldest_kept_keys_are_those_of_void_steps() -> None:
    assert oldest_kv_step([7, 8, 8], PolicyVersion(policy="main", step=8)) == 7
    assert oldest_kv_step([8, 10, 7], PolicyVersion(policy="main", step=8, incarnation=1)) == 10
