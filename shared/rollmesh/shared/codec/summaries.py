"""The summary of a sample, which its group sees without the payload. Works on messages, as `metadata` does."""

from __future__ import annotations

import hashlib
import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

from rollmesh.v1 import types_pb2

TURNS_MAX = 512
"""Maximum number of turns in a summary."""
TEXT_CHARS_MAX = 16_384
"""Maximum length of its text, characters."""
_DIGEST_BYTES = 8


def sample_summary(
    episode: types_pb2.Episode,
    sample: types_pb2.Sample,
    path: Iterable[tuple[int, types_pb2.Segment, bytes]],
    *,
    text_chars: int = 0,
) -> types_pb2.SampleSummary:
    """Return the summary of a sample of an episode. `path` has its segments with their indices and token ids, from the
    root to the leaf. `text_chars` is the maximum length of the text."""
    turns: list[types_pb2.TurnSummary] = []
    said: list[str] = []
    temperatures = [params.temperature for params in episode.sampling_params]
    greedy: set[bool] = set()
    logprobs: list[array[float]] = []
    observed, num_tokens, text = _digest(), 0, ""
    for index, segment, token_ids in path:
        if segment.role != types_pb2.SEGMENT_ROLE_ACTION:
            observed.update(token_ids)
            continue
        if text_chars:
            text += "".join([message.content for message in segment.messages])
        if token_ids and segment.source == types_pb2.SEGMENT_SOURCE_POLICY:
            num_tokens += len(token_ids) // 4
            packed, sampling = segment.logprobs, segment.sampling
            logprobs.append(_floats(packed))
            greedy.add(0 <= sampling < len(temperatures) and temperatures[sampling] == 0)
        if segment.finish == types_pb2.FINISH_REASON_UNSPECIFIED and index != sample.leaf:
            continue
        mean = _mean(logprobs)
        turns.append(
            types_pb2.TurnSummary(
                segment=index,
                num_tokens=num_tokens,
                mean_logprob=mean if math.isfinite(mean) else 0.0,
                observation=observed.hexdigest(),
            )
        )
        if text:
            said.append(text)
        observed, logprobs, num_tokens, text = _digest(), [], 0, ""
    return types_pb2.SampleSummary(
        role=sample.role,
        finish=sample.finish,
        turns=turns[:TURNS_MAX],
        text="\n\n".join(said)[-text_chars:] if text_chars else "",
        greedy=greedy == {True},
        variant=episode.variant,
    )


def _mean(logprobs: Sequence[array[float]]) -> float:
    """Return the exactly rounded mean; 0 without numbers, NaN for infinities of both signs."""
    num = sum(map(len, logprobs))
    try:
        return math.fsum(chain.from_iterable(logprobs)) / num if num else 0.0
    except ValueError:  # -inf + inf
        return math.nan


def _floats(packed: bytes) -> array[float]:
    """Return f32le numbers without a Python object for each."""
    found = array("f", packed[: len(packed) // 4 * 4])
    if sys.byteorder == "big":
        found.byteswap()
    return found


def why_invalid_summary(summary: types_pb2.SampleSummary) -> tuple[str, str, object] | None:
    """Return the first field that is out of range, what it must be, and what it is; None for a valid summary."""
    if len(summary.text) > TEXT_CHARS_MAX:
        return "text", f"have at most {TEXT_CHARS_MAX} characters", len(summary.text)
    if summary.finish not in types_pb2.FinishReason.values():
        return "finish", "be a known FinishReason", summary.finish
    if len(summary.turns) > TURNS_MAX:
        return "turns", f"have at most {TURNS_MAX} entries", len(summary.turns)
    least = 0
    for index, turn in enumerate(summary.turns):
        if turn.segment < least:
            return f"turns[{index}].segment", f"be >= {least}", turn.segment
        least = turn.segment + 1
        if turn.num_tokens < 0:
            return f"turns[{index}].num_tokens", "be >= 0", turn.num_tokens
        if not math.isfinite(turn.mean_logprob):
            return f"turns[{index}].mean_logprob", "be finite", turn.mean_logprob
        if len(turn.observation) != 2 * _DIGEST_BYTES or not set(turn.observation) <= set("0123456789abcdef"):
            return f"turns[{index}].observation", "be 16 lower-case hex digits", turn.observation
    return None


def _digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)
