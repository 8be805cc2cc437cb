"""Group-relative advantage of the weighted reward sum.

GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300):  A_i = (R_i - mean_j R_j) / (std_j R_j + epsilon)
Dr. GRPO (Liu et al. 2025, arXiv:2503.20783):             A_i = R_i - mean_j R_j            (`scale_by_std = false`)

with R_i = sum_n w_n r_n^(i) and the population standard deviation over the group: over the scored samples of each episode, then over
episodes, so that an episode with many samples does not set the baseline. For one sample per episode these are the papers' formulas.
A lone member has advantage 0. Deviation from both: members with an infrastructure failure are not in the mean.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rollmesh.shared.settings import PositiveFloat, Settings
from rollmesh.shared.trajectory import GroupContext
from rollmesh.trainer.estimators.base import GroupEstimator, centered, episode_weights, usable_rewards


class GrpoOptions(Settings):
    """Settings of the estimator `grpo`."""

    scale_by_std: bool = True
    """Divide by the group's standard deviation. False is Dr. GRPO: small differences keep their size."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation, so that a group whose members agree gets 0, not a division by zero."""


class Grpo(GroupEstimator):
    """Center reward sums within each group, and optionally scale them by their standard deviation."""

    Options: ClassVar[type[Settings]] = GrpoOptions

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage."""
        usable = [(m, r) for m in group.members if (r := usable_rewards(m)) is not None]
        sums = np.array([sum(self.weight_of(n) * v for n, v in r.items()) for _, r in usable], dtype=np.float64)
        members = [m for m, _ in usable]
        epsilon = self.options.epsilon if self.options.scale_by_std else None
        advantages = centered(sums, episode_weights(members), epsilon)
        return {m.sample_id: a for m, a in zip(members, advantages.tolist(), strict=True)}
