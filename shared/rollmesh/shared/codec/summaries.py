"""The summary of a sample, which its group sees without the payload. Works on messages, as `metadata` does."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable

from rollmesh.v1 import types_pb2

TURNS_MAX = 512
"""Maximum number of turns in a summary."""
TEXT_CHARS_MAX = 16_384
"""Maximum length of its text, characters."""


def sample_summary(
    sample: types_pb2.Sample, path: Iterable[tuple[int, types_pb2.Segment]], *, text_chars: int = 0
) -> types_pb2.SampleSummary:
    """Return the summary of a sample. `path` has its segments with their indices, from the root to the leaf. `text_chars` is the maximum
    length of the text."""
    turns: list[types_pb2.TurnSummary] = []
    said: list[str] = []
    observed = hashlib.blake2b(digest_size=8)
    logprobs: list[float] = []
    num_tokens = 0
    for index, segment in path:
        if segment.role != types_pb2.SEGMENT_ROLE_ACTION:
            observed.update(segment.token_ids)
            continue
        said += [message.content for message in segment.messages]
        if segment.source == types_pb2.SEGMENT_SOURCE_POLICY:
            num_tokens += len(segment.token_ids) // 4
            logprobs += struct.unpack_from(f"<{len(segment.logprobs) // 4}f", segment.logprobs)
        if segment.finish == types_pb2.FINISH_REASON_UNSPECIFIED and index != sample.leaf:
            continue
        mean = math.fsum(logprobs) / len(logprobs) if logprobs else 0.0
        turns.append(
            types_pb2.TurnSummary(
                segment=index,
                num_tokens=num_tokens,
                mean_logprob=mean if math.isfinite(mean) else 0.0,
                observation=observed.hexdigest(),
            )
        )
        observed, logprobs, num_tokens = hashlib.blake2b(digest_size=8), [], 0
    return types_pb2.SampleSummary(
        role=sample.role,
        finish=sample.finish,
        turns=turns[:TURNS_MAX],
        text="\n\n".join(said)[-text_chars:] if text_chars else "",
    )
