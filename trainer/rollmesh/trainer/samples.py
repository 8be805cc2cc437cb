"""Convert training samples to a table of tokens.

The tokens of a sample are the tokens of the segments on its path, concatenated. Its *trained* tokens have loss mask 1.
The columns of a `TokenTable` cover trained tokens only, sample by sample.

A sample that cannot be trained on is dropped with a typed reason. It never raises, because one bad sample must not stop
a run. Collaborators: `update` calls this module, `packing` takes the sequences, `batch` shows the table to estimators.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.domain.trajectory import (
    SAMPLED_SOURCES,
    FinishReason,
    IntArray,
    MaskArray,
    Role,
    SamplingParams,
    Segment,
    Source,
    TrainingSample,
)
from rollmesh.shared.domain.versions import staleness
from rollmesh.trainer.routes import ROUTED_EXPERTS, RouteShape, fits, routes_of
from rollmesh.trainer.sequences import Sequence1D

Rewrite = Callable[[TrainingSample], Sequence[Sequence1D] | None]
"""Returns other sequences with the trained tokens of a sample as targets, in their order; None if it cannot."""
NO_LAG = -1
"""Lag of tokens that no version of the policy sampled."""

COLUMNS = {
    "behavior": np.float32,
    "temperature": np.float32,
    "truncated": np.float32,
    "lag": np.int64,
    "sample": np.int64,
    "episode": np.int64,
    "group": np.int64,
    "turn": np.int64,
    "segment": np.int64,
    "source": np.int64,
    "position": np.int64,
}
"""Columns that every `TokenTable` has, with their types."""


class DropReason(StrEnum):
    """Reason why a leased sample is not in the gradient. Estimators may give further reasons."""

    NOT_TRAINABLE = "NOT_TRAINABLE"
    """The sample has `trainable` false."""
    NO_TRAINED_TOKENS = "NO_TRAINED_TOKENS"
    """All loss masks are 0, possibly because the bound's policy `mask` was applied."""
    UNSCORED = "UNSCORED"
    """It has no usable reward, because infrastructure failed or no scorer applied."""
    TOO_LONG = "TOO_LONG"
    """It is longer than the context of the model; with `longrope` these are the original positions."""
    NOTHING_BEFORE = "NOTHING_BEFORE"
    """The first token of its path is trained, but no token before it predicts it."""
    UNKNOWN_TOKEN = "UNKNOWN_TOKEN"
    """A token id is outside the model's vocabulary."""
    MALFORMED = "MALFORMED"
    """An array does not have one entry per token, or a mask has values other than 0 and 1."""
    OTHER_POLICY = "OTHER_POLICY"
    """A trained POLICY token has no version, or that of another policy than the sample's, so it has no staleness."""
    SOURCE_NOT_ADMITTED = "SOURCE_NOT_ADMITTED"
    """A trained token has a source that `run.external_sources` does not name."""
    NO_LOGPROBS = "NO_LOGPROBS"
    """A trained token has no finite behavior log-prob, and it was sampled, or no part of the run can use it without
    one."""
    NO_OUTPUT = "NO_OUTPUT"
    """A trained token lacks an engine output that the loss needs, e.g. because another run sampled it."""
    OTHER_ROUTERS = "OTHER_ROUTERS"
    """The experts that the engine has recorded are not those of a model with the trainer's layers and experts."""
    NO_OTHER_PROMPT = "NO_OTHER_PROMPT"
    """A feature needs the sample after another prompt, which cannot be made for it."""
    NOT_FINITE_ADVANTAGE = "NOT_FINITE_ADVANTAGE"
    """The estimator returned an advantage or a weight that is not finite."""
    WRONG_SHAPE = "WRONG_SHAPE"
    """The estimator returned arrays of the wrong shape, which the log names. No sample of the update is trained."""
    LEFT_OUT = "LEFT_OUT"
    """The estimator masked all of its tokens, no loss term has them in its token set, or no step of the update rule
    contains it."""
    NON_FINITE = "NON_FINITE"
    """The optimizer step of its minibatch had a non-finite loss or gradient and was not taken."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Trained tokens of S samples, one after the other. `lengths` [S] counts them per sample; M is its sum.

    `columns` are arrays [M], or [M, k] for a column with k values per token:
    - behavior: log-prob under the distribution that the token was sampled from, natural log; NaN for an external token,
      which was not sampled;
    - temperature: temperature at which the trainer computes the log-prob, see `trainer_temperature`;
    - truncated: 1 if it was sampled with top-p or top-k, whose renormalization the trainer's log-probs do not
      reproduce;
    - lag: staleness of the token itself, NO_LAG if the policy did not sample it;
    - sample, episode, group: numbers of its sample, episode and group in the update, from 0;
    - turn: number of finished actions before it on its path; segment: its segment on the path; both from 0;
    - source: number of its `Source`; position: its position on the path, from 0;
    - every array of the segments that the loss or the estimator needs, under its own name; external tokens have NaN, or
      0 for integers.

    The update adds `reward`, the weighted sum of the rewards of the sample, `advantages` and the requested features.
    `others` has, for each feature of other sequences, those of each sample, with the same targets as `sequences`.
    """

    sequences: tuple[Sequence1D, ...]
    sample_weights: tuple[float, ...]
    lengths: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]
    others: Mapping[Hashable, tuple[tuple[Sequence1D, ...], ...]] = field(default_factory=dict)

    def select(self, indices: Sequence[int], mask: NDArray[np.bool_] | None = None) -> TokenTable:
        """Return the table of some of the samples, in the order of `indices`, without the tokens where `mask` [M] is
        False and without samples that have no other tokens."""
        starts = np.concatenate([[0], np.cumsum(self.lengths)])
        tokens = [np.arange(starts[i], starts[i + 1]) for i in indices]
        sequences = [self.sequences[i] for i in indices]
        others = {key: [of_sample[i] for i in indices] for key, of_sample in self.others.items()}
        if mask is not None:
            sequences = [s.without(~mask[t]) for s, t in zip(sequences, tokens, strict=True)]
            others = {
                key: [_without(o, ~mask[t]) for o, t in zip(chosen, tokens, strict=True)]
                for key, chosen in others.items()
            }
            tokens = [t[mask[t]] for t in tokens]
        kept = [n for n, of_sample in enumerate(tokens) if len(of_sample)]
        chosen = np.concatenate([np.empty(0, np.int64), *(tokens[n] for n in kept)])
        return TokenTable(
            sequences=tuple(sequences[n] for n in kept),
            sample_weights=tuple(self.sample_weights[indices[n]] for n in kept),
            lengths=np.array([len(tokens[n]) for n in kept], dtype=np.int64),
            columns={name: values[chosen] for name, values in self.columns.items()},
            others={key: tuple(of_sample[n] for n in kept) for key, of_sample in others.items()},
        )


def drop_reason(
    sample: TrainingSample,
    *,
    context_max: int | None,
    vocab_size: int,
    outputs: Sequence[str] = (),
    external: bool = False,
    sources: Collection[Source] = (),
    rewrites: Mapping[Hashable, Rewrite] = MappingProxyType({}),
    routes: RouteShape | None = None,
) -> DropReason | None:
    """Return the reason why the sample cannot be trained on, or None. `outputs` names the arrays that the update needs,
    `rewrites` make the other sequences, and `routes` are the routers for which records are replayed. `external`: the
    update can train on tokens that were not sampled, which have neither log-probs nor these arrays. `sources` are those
    other than POLICY whose tokens the run trains."""
    if not all(_is_well_formed(s) for s in sample.segments):
        return DropReason.MALFORMED
    trained = [s for s in sample.segments if s.num_trainable]
    if not sample.sample.trainable:
        return DropReason.NOT_TRAINABLE
    if not trained:
        return DropReason.NO_TRAINED_TOKENS
    if any(s.source is not Source.POLICY and s.source not in sources for s in trained):
        return DropReason.SOURCE_NOT_ADMITTED
    if any(s.source is Source.POLICY and _policy_of(s) != sample.sample.policy for s in trained):
        return DropReason.OTHER_POLICY
    if context_max is not None and sum(s.num_tokens for s in sample.segments) > context_max:
        return DropReason.TOO_LONG
    if any(_has_unknown(s.token_ids, vocab_size) for s in sample.segments):
        return DropReason.UNKNOWN_TOKEN
    first = next(s for s in sample.segments if s.num_tokens)
    if first.loss_mask is not None and first.loss_mask[0]:
        return DropReason.NOTHING_BEFORE
    if any(not _has_logprobs(s) and (s.source in SAMPLED_SOURCES or not external) for s in trained):
        return DropReason.NO_LOGPROBS
    needed = outputs if routes is None else (*outputs, ROUTED_EXPERTS)
    if any(name not in s.arrays for s in trained if _has_logprobs(s) for name in needed):
        return DropReason.NO_OUTPUT
    if routes is not None and not all(fits(s, routes) for s in sample.segments):
        return DropReason.OTHER_ROUTERS
    for rewrite in rewrites.values():
        others = rewrite(sample)
        if others is None:
            return DropReason.NO_OTHER_PROMPT
        if context_max is not None and any(len(o.token_ids) > context_max for o in others):
            return DropReason.TOO_LONG
        if any(_has_unknown(o.token_ids, vocab_size) for o in others):
            return DropReason.UNKNOWN_TOKEN
    return None


def build_table(
    samples: Sequence[TrainingSample],
    *,
    update: int,
    outputs: Sequence[str] = (),
    rewrites: Mapping[Hashable, Rewrite] = MappingProxyType({}),
    routes: RouteShape | None = None,
) -> TokenTable:
    """Return the table of at least one sample that `drop_reason` accepted with the same `outputs`, `rewrites` and
    `routes`, for update `update`. With `routes`, its sequences have their records.

    Raises ValueError for a rewrite whose targets are not the trained tokens.
    """
    episodes: dict[str, int] = {}
    groups: dict[str, int] = {}
    parts: list[dict[str, Any]] = []
    absent = {name: _absent(samples, name) for name in outputs}
    for number, sample in enumerate(samples):
        index = {
            "sample": number,
            "episode": episodes.setdefault(sample.episode or sample.sample.sample_id, len(episodes)),
            "group": groups.setdefault(sample.group, len(groups)),
        }
        for part in _parts(sample, update, absent):
            parts.append(part | index)
    count = [len(part["behavior"]) for part in parts]
    columns = {
        name: np.concatenate(
            [np.broadcast_to(part[name], (n,)).astype(dtype) for part, n in zip(parts, count, strict=True)]
        )
        for name, dtype in COLUMNS.items()
    }
    return TokenTable(
        sequences=tuple(sequence_of(s, routes) for s in samples),
        sample_weights=tuple(s.sample.weight for s in samples),
        lengths=np.array([num_trained(s) for s in samples], dtype=np.int64),
        columns=columns | {name: np.concatenate([part["outputs"][name] for part in parts]) for name in outputs},
        others={key: tuple(_rewritten(rewrite, s) for s in samples) for key, rewrite in rewrites.items()},
    )


def num_trained(sample: TrainingSample) -> int:
    """Return the number of tokens of a sample with loss mask 1."""
    return sum(s.num_trainable for s in sample.segments)


def turn_numbers(segments: Sequence[Segment]) -> list[int]:
    """Return for each segment of a path the number of finished actions before it."""
    finished = [s.role is Role.ACTION and s.finish is not FinishReason.UNFINISHED for s in segments]
    return [0, *np.cumsum(finished, dtype=np.int64).tolist()][: len(segments)]


def trainer_temperature(params: SamplingParams | None) -> float:
    """Return the temperature at which the trainer computes a log-prob: 1 for greedy sampling, which reports the plain
    model's."""
    return params.temperature if params is not None and params.temperature > 0 else 1.0


def _is_well_formed(segment: Segment) -> bool:
    arrays = (segment.logprobs, segment.loss_mask, *segment.arrays.values())
    if any(a is not None and a.shape[:1] != segment.token_ids.shape for a in arrays):
        return False
    return segment.loss_mask is None or bool((segment.loss_mask <= 1).all())


def _policy_of(segment: Segment) -> str | None:
    return None if segment.version is None else segment.version.policy


def _has_unknown(token_ids: IntArray, vocab_size: int) -> bool:
    return bool(((token_ids < 0) | (token_ids >= vocab_size)).any())


def _has_logprobs(segment: Segment) -> bool:
    if segment.logprobs is None or segment.loss_mask is None:
        return False
    return bool(np.isfinite(segment.logprobs[segment.loss_mask == 1]).all())


def _absent(samples: Sequence[TrainingSample], name: str) -> NDArray[Any]:
    """Return the row [k], or the value [], of tokens without an array, with the type that the array has elsewhere in
    the batch."""
    found = (s.arrays[name] for sample in samples for s in sample.segments if name in s.arrays)
    like = next(found, np.zeros(1, np.float32))
    return np.full(like.shape[1:], np.nan if like.dtype.kind == "f" else 0, like.dtype)


def _parts(sample: TrainingSample, update: int, absent: Mapping[str, NDArray[Any]]) -> Iterator[dict[str, Any]]:
    """Yield the columns of each segment's trained tokens, as arrays or as one value for all of them. `absent` has the
    value of each output for segments without it."""
    start = 0
    turns = turn_numbers(sample.segments)
    for index, segment in enumerate(sample.segments):
        if segment.num_trainable:
            chosen = np.flatnonzero(segment.loss_mask == 1)
            logprobs = segment.logprobs if _has_logprobs(segment) else None
            known = 0 <= segment.sampling < len(sample.sampling_params)
            params = sample.sampling_params[segment.sampling] if known else None
            yield {
                "behavior": np.full(len(chosen), np.nan, np.float32) if logprobs is None else logprobs[chosen],
                "temperature": trainer_temperature(params),
                "truncated": params is not None and params.temperature > 0 and (params.top_p < 1 or params.top_k > 0),
                "lag": _lag(segment, update),
                "turn": turns[index],
                "segment": index,
                "source": int(segment.source),
                "position": start + chosen,
                "outputs": {
                    name: segment.arrays[name][chosen]
                    if name in segment.arrays
                    else np.broadcast_to(row, (len(chosen), *row.shape))
                    for name, row in absent.items()
                },
            }
        start += segment.num_tokens


def _lag(segment: Segment, update: int) -> int:
    if segment.source is not Source.POLICY or segment.version is None:
        return NO_LAG
    return staleness(update=update, oldest_step=segment.version.step)


def trained_mask(segment: Segment) -> MaskArray:
    """Return [n]: 1 for the trained tokens of a segment."""
    return np.zeros(segment.num_tokens, np.uint8) if segment.loss_mask is None else segment.loss_mask.astype(np.uint8)


def sequence_of(sample: TrainingSample, routes: RouteShape | None = None) -> Sequence1D:
    """Return the tokens of a sample, whose trained ones are the targets. With `routes`, it has its records."""
    masks = [trained_mask(s) for s in sample.segments]
    return Sequence1D(
        np.concatenate([s.token_ids for s in sample.segments]),
        np.concatenate(masks),
        None if routes is None else routes_of(sample, routes),
    )


def _rewritten(rewrite: Rewrite, sample: TrainingSample) -> tuple[Sequence1D, ...]:
    """Return the other sequences of a sample. Raises ValueError if their targets are not its trained tokens."""
    others, own = tuple(rewrite(sample) or ()), sequence_of(sample)
    targets = [np.empty(0, np.int32), *(o.token_ids[o.target_mask == 1] for o in others)]
    if not np.array_equal(np.concatenate(targets), own.token_ids[own.target_mask == 1]):
        raise ValueError(
            f"a feature rewrites sample {sample.sample.sample_id} into sequences whose targets are not its "
            f"{num_trained(sample)} trained tokens in their order; `sequences_of` must mark exactly these"
        )
    return others


def _without(sequences: Sequence[Sequence1D], excluded: NDArray[np.bool_]) -> tuple[Sequence1D, ...]:
    """Return the sequences that have other targets than those where `excluded` [targets of all of them] is True,
    without these."""
    bounds = np.cumsum([int(s.target_mask.sum()) for s in sequences])[:-1]
    remaining = [s.without(e) for s, e in zip(sequences, np.split(excluded, bounds), strict=True)]
    return tuple(s for s in remaining if s.target_mask.any())
