"""Group reward-decoupled normalisation (GDPO, 2026; code: NVlabs/GDPO, verl `compute_gdpo_outcome_advantage`).

For each reward n within a group:   A_n^(i) = (r_n^(i) - mean_j r_n^(j)) / (std_j r_n^(j) + epsilon)
Weighted sum over the rewards:      A^(i)   = sum_n w_n A_n^(i)
Whitened over the whole batch:      A       = (A - mean_batch A) / (std_batch A + epsilon)

Why: GRPO divides the *sum* by its std, so where the main rewards agree, whatever small difference is left (a 0.1-weight
length reward) becomes a full-size advantage. Here 0.1 stays 0.1. Population standard deviations throughout.
Choices the paper leaves open: "batch" is all scored members of the groups given, trained or not; a member without
reward n gets 0 from it. `scale_by_std = false` drops the per-reward division and the whitening's too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.trajectory import GroupContext, TrainingSample
from rollmesh.trainer.advantages.base import (
    AdvantageConfig,
    SegmentAdvantages,
    check_membership,
    spread_over_samples,
    usable_rewards,
    weight_of,
)


class Gdpo:
    """Per-reward normalisation in the group, weighted sum, whitening over the batch."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config

    def __call__(
        self, groups: Sequence[GroupContext], samples: Sequence[TrainingSample]
    ) -> list[SegmentAdvantages | None]:
        check_membership(groups, samples)
        raw = {g.group: self.before_whitening(g) for g in groups}
        pooled = np.array([a for members in raw.values() for a in members.values()])
        if pooled.size:
            shift, scale = pooled.mean(), self._scale(pooled)
            raw = {g: {i: (a - shift) / scale for i, a in members.items()} for g, members in raw.items()}
        return spread_over_samples(raw, samples)

    def before_whitening(self, group: GroupContext) -> dict[str, float]:
        """Sample id -> weighted sum of per-reward normalised rewards, for the members that have usable rewards."""
        rewards = {m.sample_id: r for m in group.members if (r := usable_rewards(m)) is not None}
        result = dict.fromkeys(rewards, 0.0)
        for name in sorted({n for r in rewards.values() for n in r}):
            having = [i for i, r in rewards.items() if name in r]
            values = np.array([rewards[i][name] for i in having])
            normalised = (values - values.mean()) / self._scale(values)
            for sample_id, advantage in zip(having, normalised.tolist(), strict=True):
                result[sample_id] += weight_of(self.config.weights, name) * advantage
        return result

    def _scale(self, values: NDArray[np.float64]) -> float:
        return float(values.std()) + self.config.epsilon if self.config.scale_by_std else 1.0
