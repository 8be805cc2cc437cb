"""Advantage against the length-weighted mean reward (OPO, Hao et al. 2025, arXiv:2505.23585; verl `adv_estimator:
opo`).

    b   = sum over the group of n_j R_j / sum over the group of n_j          n_j: sampled tokens of member j
    A_i = R_i - b

The baseline of least variance weighs each reward by the squared norm of the gradient of its sample. If the gradients of
tokens are orthogonal and of equal norm, that is the number of tokens, so that b needs no gradients (`vcpo` computes
them). There is no division by the standard deviation and no KL term, and training is exactly on-policy: one optimizer
step per update, on samples of the current weights.

A member without a summary counts with the mean length of the group. An episode with several samples has the weight of
one. A lone member has advantage 0, where verl leaves its reward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import GroupEstimator, GroupSize, centered, episode_weights


class Opo(GroupEstimator):
    """See the module."""

    needs_behavior = False
    group_size = GroupSize(least=2)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage."""
        members, sums = self.reward_sums(group)
        if not members:
            return {}
        weights = episode_weights(members) * lengths_of(members)
        values = centered(sums, weights / weights.sum(), None)
        return {m.sample_id: a for m, a in zip(members, values.tolist(), strict=True)}


def lengths_of(members: Sequence[MemberOutcome]) -> NDArray[np.float64]:
    """Return [n] the sampled tokens of members. One without tokens in its summary gets the mean of the others, or 1."""
    found = np.array([m.summary.num_tokens for m in members], dtype=np.float64)
    known = found > 0
    return np.where(known, found, found[known].mean() if known.any() else 1.0)
