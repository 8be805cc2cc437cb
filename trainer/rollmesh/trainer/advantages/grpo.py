"""Group-relative advantage of the weighted reward sum.

GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300):  A_i = (R_i - mean_j R_j) / (std_j R_j + epsilon)
Dr. GRPO (Liu et al. 2025, arXiv:2503.20783):             A_i = R_i - mean_j R_j            (`scale_by_std = false`)

with R_i = sum_n w_n r_n^(i) and the population standard deviation over all scored members j of the group.
A lone member has advantage 0. Deviation from both: members with an infrastructure failure are not in the mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollmesh.shared.trajectory import GroupContext, TrainingSample
from rollmesh.trainer.advantages.base import (
    AdvantageConfig,
    SegmentAdvantages,
    check_membership,
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
        return spread_over_samples({g.group: self._of_group(g) for g in groups}, samples)

    def _of_group(self, group: GroupContext) -> dict[str, float]:
        sums: dict[str, float] = {}
        for member in group.members:
            rewards = usable_rewards(member)
            if rewards is not None:
                sums[member.sample_id] = sum(weight_of(self.config.weights, n) * v for n, v in rewards.items())
        if not sums:
            return {}
        values = np.fromiter(sums.values(), dtype=np.float64)
        advantages = values - values.mean()
        if self.config.scale_by_std:
            advantages /= values.std() + self.config.epsilon
        return dict(zip(sums, advantages.tolist(), strict=True))
