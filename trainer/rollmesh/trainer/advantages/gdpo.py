"""Group reward-decoupled normalisation (GDPO, 2026; code: NVlabs/GDPO, verl `compute_gdpo_outcome_advantage`).

For each reward n within a group:   A_n^(i) = (r_n^(i) - mean_j r_n^(j)) / (std_j r_n^(j) + epsilon)
Weighted sum over the rewards:      A^(i)   = sum_n w_n A_n^(i)
Whitened over the whole batch:      A       = (A - mean_batch A) / (std_batch A + epsilon)

Why: GRPO divides the *sum* by its std, so where the main rewards agree, whatever small difference is left (a 0.1-weight
length reward) becomes a full-size advantage. Here 0.1 stays 0.1. Population standard deviations throughout.
Means and standard deviations count every episode once, shared by its samples.
Choices the paper leaves open: "batch" is all scored members of the groups given, trained or not; a member without
reward n gets 0 from it. `scale_by_std = false` drops the per-reward division and the whitening's too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmesh.shared.trajectory import GroupContext, TrainingSample
from rollmesh.trainer.advantages.base import (
    AdvantageConfig,
    SegmentAdvantages,
    centered,
    check_membership,
    episode_weights,
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
        raw = {g.group: self.of_group(g) for g in groups}
        scored = [(g.group, m) for g in groups for m in g.members if m.sample_id in raw[g.group]]
        pooled = np.array([raw[group][m.sample_id] for group, m in scored], dtype=np.float64)
        whitened = centered(pooled, episode_weights([m for _, m in scored]), self.config.scaling)
        result: dict[str, dict[str, float]] = {g.group: {} for g in groups}
        for (group, member), advantage in zip(scored, whitened.tolist(), strict=True):
            result[group][member.sample_id] = advantage
        return spread_over_samples(result, samples)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Sample id -> weighted sum of per-reward normalized rewards, before whitening."""
        usable = [(m, r) for m in group.members if (r := usable_rewards(m)) is not None]
        result = {m.sample_id: 0.0 for m, _ in usable}
        for name in sorted({n for _, r in usable for n in r}):
            having = [(m, r[name]) for m, r in usable if name in r]
            values = np.array([value for _, value in having], dtype=np.float64)
            normalised = centered(values, episode_weights([m for m, _ in having]), self.config.scaling)
            for (member, _), advantage in zip(having, normalised.tolist(), strict=True):
                result[member.sample_id] += weight_of(self.config.weights, name) * advantage
        return result
