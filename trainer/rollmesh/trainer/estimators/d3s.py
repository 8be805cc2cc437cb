"""GRPO on the samples and tokens with the most signal, fewer at first (Dynamic Dual-Level Down-Sampling, D3S, 2025-09,
arXiv:2509.22115; no public code).

    samples   of each pool, the subset of the given size whose advantages have the largest variance
    tokens    of those of the chosen samples, the given share with the largest |A| H
    schedule  share(k) = first + (last - first) min(1, (k - 1) / relax_updates)      for update k = 1, 2, ...

The subset of largest variance is always some of the smallest and some of the largest values, so that one pass over the
sorted advantages finds it; with rewards of 0 and 1 it has as many right as wrong samples, if there are enough. H is the
entropy of the policy at the start of the update, in nats, over the whole vocabulary. A pool is a group, or the batch.

From the abstract. Not established, so configuration: the shares, the shape of the schedule, and whether a pool is a
group or the batch. Deviations: the advantages are those of `grpo` over all members, also those that are not chosen, as
a baseline of the chosen alone would be biased. Samples are chosen among those that are leased. Of equal variances, the
subset with the most equal numbers of small and large values is chosen, and of equal samples or tokens the first ones.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rollmesh.shared.config.settings import PositiveInt, Settings
from rollmesh.trainer.estimators.base import DOWN_SAMPLED, Estimate
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:  # they import torch
    from rollmesh.trainer.batch import UpdateBatch
    from rollmesh.trainer.features import FeatureRequest

ENTROPY = "start_entropy"
_Part = Annotated[float, Meta(gt=0, le=1)]


class D3sOptions(GrpoOptions):
    """Settings of the estimator `d3s`: those of `grpo`, and the schedule."""

    samples_first: _Part = 0.5
    """Share of the samples of a pool that the first update trains."""
    samples_last: _Part = 1.0
    """The same after `relax_updates` updates."""
    tokens_first: _Part = 0.2
    """Share of the tokens of these samples that the first update trains."""
    tokens_last: _Part = 1.0
    """The same after `relax_updates` updates."""
    relax_updates: PositiveInt = 100
    """Number of updates in which the shares change, linearly."""
    pool: Literal["group", "batch"] = "group"
    """Samples among which the subset of largest variance is chosen."""


class D3s(Grpo):
    """Choose samples by the variance of their advantages, and tokens by advantage and entropy."""

    Options: ClassVar[type[Settings]] = D3sOptions
    needs = (ENTROPY,)

    @property
    def features(self) -> dict[str, FeatureRequest]:
        from rollmesh.trainer.features import FeatureRequest  # they import torch, which the reward service lacks
        from rollmesh.trainer.vocabulary_features import Entropy

        return {ENTROPY: FeatureRequest(Entropy(), "start")}

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: D3sOptions = self.options
        found = super().__call__(batch)
        per_sample = batch.first(found.advantages).astype(np.float64)
        pools: dict[str, list[int]] = {}
        for number, sample in enumerate(batch.samples):
            if number not in found.dropped:
                pools.setdefault(sample.group if options.pool == "group" else "", []).append(number)
        share = scheduled(options.samples_first, options.samples_last, batch.update, options.relax_updates)
        chosen = np.zeros(len(batch.samples), dtype=bool)
        for numbers in pools.values():
            size = max(min(2, len(numbers)), number_of(share, len(numbers)))
            chosen[[numbers[i] for i in widest_subset(per_sample[numbers], size)]] = True
        at = [n for numbers in pools.values() for n in numbers if not chosen[n]]
        tokens = np.repeat(chosen, batch.lengths)
        token_share = scheduled(options.tokens_first, options.tokens_last, batch.update, options.relax_updates)
        signal = np.abs(found.advantages.astype(np.float64)) * batch[ENTROPY]
        mask = np.zeros(len(tokens), dtype=bool)
        mask[largest(signal, np.flatnonzero(tokens), token_share)] = True
        candidates = [n for numbers in pools.values() for n in numbers]
        metrics = {
            "sample_share": float(chosen[candidates].mean()) if candidates else 0.0,
            "token_share": float(mask.sum() / max(1, tokens.sum())),
            "variance": float(per_sample[chosen].var()) if candidates else 0.0,
            "variance_all": float(per_sample[candidates].var()) if candidates else 0.0,
        }
        return replace(
            found,
            dropped={**dict.fromkeys(at, DOWN_SAMPLED), **found.dropped},
            token_mask=mask,
            metrics={**found.metrics, **metrics},
        )


def scheduled(first: float, last: float, update: int, relax_updates: int) -> float:
    """Return the share of an update, which counts from 1."""
    return first + (last - first) * min(1.0, (update - 1) / relax_updates)


def number_of(share: float, size: int) -> int:
    """Return the share of `size`, rounded up."""
    return min(size, ceil(share * size - 1e-9))


def widest_subset(values: NDArray[np.float64], size: int) -> list[int]:
    """Return the places of `size` of the values [n] with the largest variance."""
    order = np.argsort(values, kind="stable")
    smallest = sorted(range(size + 1), key=lambda k: abs(2 * k - size))
    subsets = [np.concatenate([order[:k], order[len(values) - (size - k) :]]) for k in smallest]
    variances = [float(np.var(values[subset])) for subset in subsets]
    largest_variance = max(variances)
    chosen: list[int] = next(
        subset for subset, v in zip(subsets, variances, strict=True) if v >= largest_variance - 1e-12
    ).tolist()
    return sorted(chosen)


def largest(signal: NDArray[np.float64], places: NDArray[np.int64], share: float) -> NDArray[np.int64]:
    """Return the share of `places` with the largest signal, of a signal [M]."""
    order = places[np.argsort(-signal[places], kind="stable")]
    return order[: number_of(share, len(places))]
