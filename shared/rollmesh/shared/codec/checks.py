"""Check that an episode is well formed. The same rules apply to both directions, so that no sender writes what a
receiver rejects.

Every error is an `InvalidInput` naming the field by its path in the proto (`episode.segments[3].logprobs`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.codec.arrays import DTYPES
from rollmesh.shared.domain.environment_reward import ENVIRONMENT_EVIDENCE_CHARS_MAX, EnvironmentReward
from rollmesh.shared.domain.reward_range import RANGE_FORM, in_reward_range
from rollmesh.shared.domain.text import count_of
from rollmesh.shared.domain.trajectory import (
    ROOT,
    SAMPLED_SOURCES,
    WHOLE_SAMPLE,
    Episode,
    EpisodeKey,
    GroupContext,
    Outcome,
    Reward,
    Sample,
    SamplingParams,
    Segment,
    Source,
    ToolOutcome,
)
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import field_error

TEMPERATURE_MAX = 10.0

ARRAYS_MAX = 16
"""Most `Segment.arrays` of one segment."""
ARRAY_BYTES_MAX = 1 << 20
"""Largest of them, in bytes: 262144 tokens of float32. A whole episode must fit into one message."""
NAME_CHARS_MAX = 64
"""Maximum length of the name of a reward."""
TOOL_NAME_CHARS_MAX = 128
"""Maximum length of the name of a tool."""
REWARDS_MAX = 1024
"""Most rewards of one sample."""
EXTEND_MAX = 49_152
"""Most episodes that a finalizer may request at once: three times the largest `group_size`, because a group may grow to
four times it."""
REASON_FORM = "have at most 64 characters of A-Z a-z 0-9 _ . : / -"
"""Form of the reason for which a sample ends. A run counts its samples by reason, so a reason names a case and holds no
numbers of it."""
MEASURES_MAX = 16
"""Most measures that a trainer reports of one group."""
WORD_FORM = "have 1 to 64 characters of A-Z a-z 0-9 _ . : / -"
"""Form of the reason for which a finalizer drops a member, and of the name of a measure."""
_REASON = re.compile(r"[A-Za-z0-9_.:/-]{0,64}")
_ARRAY_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


def is_reason(text: str) -> bool:
    """Return whether a text has `REASON_FORM`."""
    return _REASON.fullmatch(text) is not None


def is_word(text: str) -> bool:
    """Return whether a text has `WORD_FORM`."""
    return text != "" and is_reason(text)


def check_episode(episode: Episode, field: str = "episode") -> None:
    """Raise `InvalidInput` for the first error."""
    _check_key(episode.key, f"{field}.key")
    for index, params in enumerate(episode.sampling_params):
        check_sampling_params(params, f"{field}.sampling_params[{index}]")
    for index, segment in enumerate(episode.segments):
        check_segment(segment, f"{field}.segments[{index}]", index=index, num_params=len(episode.sampling_params))
    _check_samples(episode, field)
    for stage, seconds in episode.stage_s.items():
        _finite_at_least_0(seconds, f"{field}.stage_s[{stage}]")
    for number, use in enumerate(episode.endpoints):
        for name in use.SUMS:
            _finite_at_least_0(getattr(use, name), f"{field}.endpoints[{number}].{name}")
    if (chains := episode.chains) is not None:
        for cause, num in chains.begun.items():
            _finite_at_least_0(num, f"{field}.chains.begun[{cause[:80]}]")
        for name in chains.__struct_fields__[1:]:
            _finite_at_least_0(getattr(chains, name), f"{field}.chains.{name}")


def check_segment(segment: Segment, field: str, *, index: int, num_params: int) -> None:
    """`index` is the segment's index in the episode, and `num_params` the number of the episode's sampling
    parameters."""
    if not ROOT <= segment.parent < index:
        must = f"be {ROOT} (root) or the index of an earlier segment, below {index}"
        raise field_error(f"{field}.parent", must, segment.parent)
    if segment.token_ids.ndim != 1:
        raise field_error(f"{field}.token_ids", "have one dimension", segment.token_ids.ndim)
    # The highest byte of a negative int32 is not ASCII. The minimum costs five times as much.
    if not segment.token_ids.astype(DTYPES["i32le"], copy=False).tobytes()[3::4].isascii():
        raise field_error(f"{field}.token_ids", "be >= 0", int(segment.token_ids.min()))
    if segment.tool is not None:
        check_tool(segment.tool, f"{field}.tool")
    _check_arrays(segment, field)
    _check_origin(segment, field, num_params)


def check_tool(tool: ToolOutcome, field: str) -> None:
    if len(tool.name) > TOOL_NAME_CHARS_MAX:
        raise field_error(f"{field}.name", f"have at most {TOOL_NAME_CHARS_MAX} characters", len(tool.name))
    if tool.ok != (not tool.error):
        raise field_error(f"{field}.error", "be empty exactly if `ok` is set", tool.error[:100])
    if not is_reason(tool.error):
        raise field_error(f"{field}.error", REASON_FORM, tool.error[:100])
    if not 0.0 <= tool.wall_s < math.inf:  # a NaN fails every comparison
        raise field_error(f"{field}.wall_s", "be finite and >= 0", tool.wall_s)


def check_sampling_params(params: SamplingParams, field: str) -> None:
    if not 0.0 <= params.temperature <= TEMPERATURE_MAX:  # a NaN fails every comparison
        raise field_error(f"{field}.temperature", f"be in [0, {TEMPERATURE_MAX:g}]", params.temperature)
    if not 0.0 < params.top_p <= 1.0:
        raise field_error(f"{field}.top_p", "be in (0, 1]", params.top_p)
    if params.top_k < 0:
        raise field_error(f"{field}.top_k", "be >= 0 (0 for off)", params.top_k)
    if params.max_tokens < 1:
        raise field_error(f"{field}.max_tokens", "be >= 1", params.max_tokens)
    if "" in params.stop:
        raise field_error(f"{field}.stop", "not contain an empty string, because it would stop at once", params.stop)
    if not 0 <= params.seed < 2**64:
        raise field_error(f"{field}.seed", "be in [0, 2**64)", params.seed)


def check_version(version: PolicyVersion, field: str, name: str = "") -> None:
    """`field`, or its part `name`, holds the version."""
    for part, number in (("step", version.step), ("incarnation", version.incarnation)):
        if number < 0:
            raise field_error(".".join(filter(None, (field, name, part))), "be >= 0", number)


def check_sample(sample: Sample, field: str, *, num_segments: int) -> None:
    if not sample.sample_id:
        raise field_error(f"{field}.sample_id", "not be empty", "")
    if not 0 <= sample.leaf < num_segments:
        raise field_error(f"{field}.leaf", f"be the index of one of {num_segments} segments", sample.leaf)
    _finite_at_least_0(sample.weight, f"{field}.weight")
    check_rewards(sample.rewards, f"{field}.rewards", num_segments=num_segments)


def check_rewards(rewards: Sequence[Reward], field: str, *, num_segments: int | None = None) -> None:
    """`num_segments` limits the segment of a reward; None if the episode is not available."""
    for index, reward in enumerate(rewards):
        _check_reward(reward, f"{field}[{index}]", num_segments)


def check_reward_names(rewards: Sequence[Reward]) -> None:
    """Raise ValueError for more rewards of a sample, or a longer name, than a coordinator records."""
    if len(rewards) > REWARDS_MAX:
        raise ValueError(f"a sample must have at most {REWARDS_MAX} rewards, got {len(rewards)}")
    for reward in rewards:
        if not 1 <= len(reward.name) <= NAME_CHARS_MAX:
            raise ValueError(
                f"the name of a reward must have 1 to {NAME_CHARS_MAX} characters, got {reward.name[:100]!r}"
            )


def check_environment_reward(reward: EnvironmentReward, field: str) -> None:
    """Check all fields but the segments, which `check_environment_segments` compares with the episode."""
    if not 1 <= len(reward.name) <= NAME_CHARS_MAX:
        raise field_error(f"{field}.name", f"have 1 to {NAME_CHARS_MAX} characters", reward.name)
    if not in_reward_range(reward.value):
        raise field_error(f"{field}.value", RANGE_FORM, reward.value)
    if len(reward.evidence) > ENVIRONMENT_EVIDENCE_CHARS_MAX:
        must = f"have at most {ENVIRONMENT_EVIDENCE_CHARS_MAX} characters"
        raise field_error(f"{field}.evidence", must, len(reward.evidence))


def check_environment_segments(reward: EnvironmentReward, field: str, *, num_segments: int) -> None:
    """`num_segments` is the number of segments of the episode."""
    for name, index in (("segment", reward.segment), ("branch", reward.branch)):
        if not -1 <= index < num_segments:
            raise field_error(f"{field}.{name}", f"be -1 or the index of one of {num_segments} segments", index)


def check_group_context(group: GroupContext, field: str = "group") -> None:
    if not group.group:
        raise field_error(f"{field}.group", "not be empty", "")
    for index, member in enumerate(group.members):
        if not member.sample_id:
            raise field_error(f"{field}.members[{index}].sample_id", "not be empty", "")
        check_rewards(member.rewards, f"{field}.members[{index}].rewards")


# Parts ----------------------------------------------------------------------------------------------------------------


def _check_key(key: EpisodeKey, field: str) -> None:
    for name, value in (("run", key.run), ("task", key.task), ("group", key.group), ("episode", key.episode)):
        if not value:
            raise field_error(f"{field}.{name}", "not be empty", "")
    if key.attempt < 1:
        raise field_error(f"{field}.attempt", "be >= 1", key.attempt)


def _check_arrays(segment: Segment, field: str) -> None:
    shape, mask = segment.token_ids.shape, segment.loss_mask
    for name, floats in (("logprobs", segment.logprobs), ("logprobs_model", segment.logprobs_model)):
        if floats is None:
            continue
        if floats.shape != shape:
            raise field_error(
                f"{field}.{name}", f"have {count_of(segment.num_tokens, 'value')}, one per token", floats.size
            )
        # The square of the norm is finite only if every value is. It costs a third, and may overflow.
        if not math.isfinite(floats.dot(floats)) and not np.isfinite(floats).all():
            where = int(np.flatnonzero(~np.isfinite(floats))[0])
            raise field_error(f"{field}.{name}[{where}]", "be finite", float(floats[where]))
    if mask is not None:
        if mask.shape != shape:
            raise field_error(
                f"{field}.loss_mask", f"have {count_of(segment.num_tokens, 'value')}, one per token", mask.size
            )
        if mask.tobytes().strip(b"\0\1"):  # bytes other than 0 and 1
            raise field_error(f"{field}.loss_mask", "contain only 0 and 1", int(mask.max()))
    if segment.arrays:
        _check_columns(segment, field)


def _check_columns(segment: Segment, field: str) -> None:
    if len(segment.arrays) > ARRAYS_MAX:
        raise field_error(f"{field}.arrays", f"have at most {ARRAYS_MAX} entries", len(segment.arrays))
    for name, values in segment.arrays.items():
        if not _ARRAY_NAME.fullmatch(name):
            raise field_error(f"{field}.arrays", f"have names that match {_ARRAY_NAME.pattern}", name)
        check_array(values, f"{field}.arrays[{name}]", segment.num_tokens)


def check_array(values: NDArray[Any], field: str, num_tokens: int) -> None:
    """Check type, shape [n] or [n, k], size and finite values of a per-token array."""
    if values.dtype.newbyteorder("<") not in DTYPES.values():
        raise field_error(f"{field}.dtype", f"be one of {', '.join(DTYPES)}", str(values.dtype))
    if values.ndim not in (1, 2) or values.shape[0] != num_tokens or values.shape[1:] == (0,):
        must = f"be [{num_tokens}] or [{num_tokens}, k] with k >= 1"
        raise field_error(f"{field}.shape", must, list(values.shape))
    if values.nbytes > ARRAY_BYTES_MAX:
        raise field_error(field, f"have at most {ARRAY_BYTES_MAX} bytes", values.nbytes)
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise field_error(f"{field}[{where}]", "be finite", float(values.flat[where]))


def _check_origin(segment: Segment, field: str, num_params: int) -> None:
    sampled = segment.source in SAMPLED_SOURCES
    if sampled and segment.logprobs is None:
        must = f"be set, because {segment.source.name} tokens are sampled"
        raise field_error(f"{field}.logprobs", must, None)
    if not sampled and segment.logprobs is not None:
        must = f"have no values, because {segment.source.name} tokens are not sampled"
        raise field_error(f"{field}.logprobs", must, segment.logprobs.size)
    if segment.source is Source.POLICY and segment.version is None:
        must = "be set, because POLICY tokens carry the weights that sampled them"
        raise field_error(f"{field}.version", must, None)
    if segment.version is not None:
        check_version(segment.version, field, "version")
    if (segment.version is None) != (segment.kv_step_oldest is None):
        raise field_error(f"{field}.kv_step_oldest", "be set exactly where `version` is", segment.kv_step_oldest)
    if segment.kv_step_oldest is not None and segment.kv_step_oldest < 0:
        raise field_error(f"{field}.kv_step_oldest", "be >= 0", segment.kv_step_oldest)
    if not -1 <= segment.sampling < num_params:
        must = f"be -1 (not sampled) or the index of one of {num_params} sampling_params"
        raise field_error(f"{field}.sampling", must, segment.sampling)


def _check_samples(episode: Episode, field: str) -> None:
    seen: set[str] = set()
    for index, sample in enumerate(episode.samples):
        where = f"{field}.samples[{index}]"
        check_sample(sample, where, num_segments=len(episode.segments))
        if sample.sample_id in seen:
            raise field_error(f"{where}.sample_id", "be unique in the episode", sample.sample_id)
        seen.add(sample.sample_id)


def _check_reward(reward: Reward, field: str, num_segments: int | None) -> None:
    if not reward.name:
        raise field_error(f"{field}.name", "not be empty", "")
    if reward.outcome is Outcome.OK and not in_reward_range(reward.value):
        raise field_error(f"{field}.value", RANGE_FORM, reward.value)
    if reward.segment < WHOLE_SAMPLE or (num_segments is not None and reward.segment >= num_segments):
        must = f"be {WHOLE_SAMPLE} (whole sample) or the index of a segment"
        raise field_error(f"{field}.segment", must, reward.segment)


def _finite_at_least_0(value: float, field: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise field_error(field, "be finite and >= 0", value)
