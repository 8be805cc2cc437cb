"""Training samples as flat token arrays: the one place where segments become numbers.

A sample's tokens are its path's segments, concatenated; its *trained* tokens are those with loss mask 1. All arrays of a
`TokenTable` run over trained tokens only, sample by sample.

A sample that cannot be trained on is dropped with a typed reason and never raises: one odd sample must not stop a run.
Collaborators: `update` (drives), `packing` (takes the sequences), `advantages` (per-segment values).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.trajectory import FloatArray, SamplingParams, Segment, Source, TrainingSample
from rollmesh.shared.versions import staleness
from rollmesh.trainer.advantages import SegmentAdvantages
from rollmesh.trainer.packing import Sequence1D

NO_LAG = -1
"""Lag of tokens that no version of the policy sampled."""


class DropReason(Enum):
    """Why a leased sample is not in the gradient."""

    NOT_TRAINABLE = "NOT_TRAINABLE"
    """The sample says so itself."""
    NO_TRAINED_TOKENS = "NO_TRAINED_TOKENS"
    """All loss masks are 0 (the bound's `mask` policy may have folded in)."""
    UNSCORED = "UNSCORED"
    """No usable reward: infrastructure failed, or nothing scored it."""
    TOO_LONG = "TOO_LONG"
    """Longer than the model's context."""
    NOTHING_BEFORE = "NOTHING_BEFORE"
    """The first token of its path is trained: nothing stands before it that it could be predicted from."""
    UNKNOWN_TOKEN = "UNKNOWN_TOKEN"
    """A token id outside the model's vocabulary."""
    MALFORMED = "MALFORMED"
    """A log-prob or mask array that has not one entry per token, or a mask with other values than 0 and 1."""
    NO_LOGPROBS = "NO_LOGPROBS"
    """A trained token has no behaviour log-prob, or a non-finite one."""
    NON_FINITE = "NON_FINITE"
    """Its optimiser step had a non-finite loss or gradient and was not taken."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Trained tokens of some samples: `lengths` [S] per sample, everything else [M] with M = sum of lengths.

    `lag` is the token's own staleness (NO_LAG if not sampled by the policy); `truncated` is 1 where it was sampled with
    top-p or top-k, whose renormalisation the trainer's log-probs do not reproduce.
    """

    sequences: tuple[Sequence1D, ...]
    sample_weights: tuple[float, ...]
    lengths: NDArray[np.int64]
    behaviour: FloatArray
    temperature: FloatArray
    advantages: FloatArray
    lag: NDArray[np.int64]
    truncated: FloatArray

    def select(self, indices: Sequence[int]) -> TokenTable:
        """The table of some of the samples, in the order given."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        tokens = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in indices])
        return TokenTable(
            sequences=tuple(self.sequences[i] for i in indices),
            sample_weights=tuple(self.sample_weights[i] for i in indices),
            lengths=self.lengths[np.asarray(indices)],
            behaviour=self.behaviour[tokens],
            temperature=self.temperature[tokens],
            advantages=self.advantages[tokens],
            lag=self.lag[tokens],
            truncated=self.truncated[tokens],
        )


def drop_reason(
    sample: TrainingSample, advantage: SegmentAdvantages | None, *, context_max: int | None, vocab_size: int
) -> DropReason | None:
    """Why this sample cannot be trained on; None if it can."""
    if not all(_is_well_formed(s) for s in sample.segments):
        return DropReason.MALFORMED
    trained = [s for s in sample.segments if s.num_trainable]
    if not sample.sample.trainable:
        return DropReason.NOT_TRAINABLE
    if not trained:
        return DropReason.NO_TRAINED_TOKENS
    if advantage is None:
        return DropReason.UNSCORED
    if context_max is not None and sum(s.num_tokens for s in sample.segments) > context_max:
        return DropReason.TOO_LONG
    if any(((s.token_ids < 0) | (s.token_ids >= vocab_size)).any() for s in sample.segments):
        return DropReason.UNKNOWN_TOKEN
    first = next(s for s in sample.segments if s.num_tokens)
    if first.loss_mask is not None and first.loss_mask[0]:
        return DropReason.NOTHING_BEFORE
    if not all(_has_logprobs(s) for s in trained):
        return DropReason.NO_LOGPROBS
    return None


def build_table(
    samples: Sequence[TrainingSample], advantages: Sequence[SegmentAdvantages], *, update: int
) -> TokenTable:
    """The table of samples that `drop_reason` passed, for update `update`; at least one."""
    columns: list[list[NDArray[np.float64]]] = [[] for _ in range(5)]
    for sample, per_segment in zip(samples, advantages, strict=True):
        for segment, advantage in zip(sample.segments, per_segment, strict=True):
            if segment.num_trainable:
                for column, values in zip(columns, _segment_columns(sample, segment, advantage, update), strict=True):
                    column.append(values)
    behaviour, temperature, advantage_column, lag, truncated = (np.concatenate(c) for c in columns)
    return TokenTable(
        sequences=tuple(_sequence(s) for s in samples),
        sample_weights=tuple(s.sample.weight for s in samples),
        lengths=np.array([num_trained(s) for s in samples], dtype=np.int64),
        behaviour=behaviour.astype(np.float32),
        temperature=temperature.astype(np.float32),
        advantages=advantage_column.astype(np.float32),
        lag=lag.astype(np.int64),
        truncated=truncated.astype(np.float32),
    )


def num_trained(sample: TrainingSample) -> int:
    """Tokens of a sample with loss mask 1."""
    return sum(s.num_trainable for s in sample.segments)


def trainer_temperature(params: SamplingParams | None) -> float:
    """Temperature at which the trainer evaluates a token: greedy sampling reports the plain model's log-probs."""
    return params.temperature if params is not None and params.temperature > 0 else 1.0


def _is_well_formed(segment: Segment) -> bool:
    arrays = (segment.logprobs, segment.loss_mask)
    if any(a is not None and a.shape != segment.token_ids.shape for a in arrays):
        return False
    return segment.loss_mask is None or bool((segment.loss_mask <= 1).all())


def _has_logprobs(segment: Segment) -> bool:
    if segment.logprobs is None or segment.loss_mask is None:
        return False
    return bool(np.isfinite(segment.logprobs[segment.loss_mask == 1]).all())


def _segment_columns(
    sample: TrainingSample, segment: Segment, advantage: FloatArray, update: int
) -> tuple[NDArray[np.float64], ...]:
    assert segment.logprobs is not None
    assert segment.loss_mask is not None
    chosen = segment.loss_mask == 1
    known = 0 <= segment.sampling < len(sample.sampling_params)
    params = sample.sampling_params[segment.sampling] if known else None
    truncated = params is not None and params.temperature > 0 and (params.top_p < 1 or params.top_k > 0)
    count = int(chosen.sum())
    return (
        segment.logprobs[chosen].astype(np.float64),
        np.full(count, trainer_temperature(params)),
        np.broadcast_to(advantage, (segment.num_tokens,))[chosen].astype(np.float64),
        np.full(count, float(_lag(segment, update))),
        np.full(count, float(truncated)),
    )


def _lag(segment: Segment, update: int) -> int:
    if segment.source is not Source.POLICY or segment.version is None:
        return NO_LAG
    return staleness(update=update, oldest_step=segment.version.step)


def _sequence(sample: TrainingSample) -> Sequence1D:
    masks = [
        np.zeros(s.num_tokens, dtype=np.uint8) if s.loss_mask is None else s.loss_mask.astype(np.uint8)
        for s in sample.segments
    ]
    return Sequence1D(np.concatenate([s.token_ids for s in sample.segments]), np.concatenate(masks))
