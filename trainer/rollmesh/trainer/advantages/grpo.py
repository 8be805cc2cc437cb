"""Group-relative advantage of the weighted reward sum.

GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300):  A_i = (R_i - mean_j R_j) / (std_j R_j + epsilon)
Dr. GRPO (Liu et al. 2025, arXiv:2503.20783):             A_i = R_i - mean_j R_j            (`scale_by_std = false`)

with R_i = sum_n w_n r_n^(i) and the population standard deviation over the group: over the scored samples of each episode, then over
episodes, so that an episode with many samples does not set the baseline. For one sample per episode these are the papers' formulas.
A lone member has advantage 0. Deviation from both: members with an infrastructure failure are not in the mean.
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


class Grpo:
    """Mean-centred, optionally std-scaled reward sums within each group."""

    def __init__(self, config: AdvantageConfig) -> None:
        self.config = config

    def __call__(
        self, groups: Sequence[GroupContext], samples: Sequence[TrainingSample]
    ) -> list[SegmentAdvantages | None]:
        check_membership(groups, samples)
        return spread_over_samples({g.group: self.of_group(g) for g in groups}, samples)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Sample id -> advantage."""
        usable = [(m, r) for m in group.members if (r := usable_rewards(m)) is not None]
        sums = [sum(weight_of(self.config.weights, n) * v for n, v in r.items()) for _, r in usable]
        members = [m for m, _ in usable]
        advantages = centered(np.array(sums, dtype=np.float64), episode_weights(members), self.config.scaling)
        return {m.sample_id: a for m, a in zip(members, advantages.tolist(), strict=True)}
