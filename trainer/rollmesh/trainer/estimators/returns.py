"""Rewards, discounted sums and whitening per token, for estimators whose advantage depends on the token.

All arrays are over the M trained tokens of a batch, sample by sample. Tokens between two turns, which the policy did
not sample, are not among them, so that a discount counts sampled tokens alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollmesh.trainer.estimators.base import UNSCORED, centered
from rollmesh.trainer.estimators.turns import filled_members, turn_returns

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.batch import UpdateBatch

PerToken = NDArray[np.float64]
"""[M] one value per trained token."""


def token_rewards(batch: UpdateBatch, weights: Mapping[str, float]) -> tuple[PerToken, dict[int, str]]:
    """Return [M] the weighted reward of each token, and the samples without usable rewards as `Estimate.dropped`.

    The reward of a turn is that of its last trained token, or of the last one before it. Rewards of the whole sample
    are those of its last token. A turn before the first trained token has no token to reward.
    """
    rewards = np.zeros(int(batch.lengths.sum()))
    dropped: dict[int, str] = {}
    end = 0
    for number, (member, length) in enumerate(zip(filled_members(batch), batch.lengths.tolist(), strict=True)):
        start, end = end, end + length
        of_turns = turn_returns(member, weights, 0.0)  # a discount of 0 leaves the reward of each turn
        if of_turns is None:
            dropped[number] = UNSCORED
            continue
        after = np.searchsorted(batch["turn"][start:end], np.arange(len(of_turns)), side="right")
        after[-1] = length
        np.add.at(rewards, (start + after - 1)[after > 0], of_turns[after > 0])
    return rewards, dropped


def discounted_sums(values: PerToken, lengths: NDArray[np.int64], factors: NDArray[np.float64]) -> PerToken:
    """Return [M]: x_t = values_t + factor x_(t + 1) within each sample, of `lengths` [S] and `factors` [S]."""
    sums = np.zeros(len(values))
    order = np.argsort(-lengths, kind="stable")
    last, negated, factors = np.cumsum(lengths)[order] - 1, -lengths[order], factors[order]
    running = np.zeros(len(lengths))
    for back in range(int(lengths.max(initial=0))):
        active = int(np.searchsorted(negated, -back))  # samples of more than `back` tokens
        places = last[:active] - back
        running[:active] = values[places] + factors[:active] * running[:active]
        sums[places] = running[:active]
    return sums


def shifted(values: PerToken, lengths: NDArray[np.int64]) -> PerToken:
    """Return [M]: the value of the next token of the sample, 0 after its last one."""
    after = np.concatenate([values[1:], [0.0]])
    after[np.cumsum(lengths) - 1] = 0.0
    return after


def whitened(values: PerToken, batch: UpdateBatch, dropped: Mapping[int, str], epsilon: float = 1e-8) -> PerToken:
    """Return [M]: `values` with mean 0 and standard deviation 1 over the tokens of the samples that are not `dropped`,
    and 0 at the others. The tokens of a sample count with its weight, so that an episode with several samples does not
    count several times."""
    weights = np.array(batch.table.sample_weights, dtype=np.float64)
    weights[list(dropped)] = 0.0
    of_tokens = np.repeat(weights, batch.lengths)
    kept = of_tokens > 0
    found = np.zeros(len(values))
    if kept.any():
        found[kept] = centered(values[kept], of_tokens[kept] / of_tokens[kept].sum(), epsilon)
    return found


def divergence_of(batch: UpdateBatch) -> PerToken:
    """Return [M]: log prox - log ref, the estimate k1 of the divergence from the reference, limited to +-20."""
    found: PerToken = np.clip(batch["proximal"].astype(np.float64) - batch["reference"], -20.0, 20.0)
    return found
