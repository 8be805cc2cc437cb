"""Advantages as z-scores over the batch, without outliers (StableReinforce of R1-Reward, 2025-05, arXiv:2505.02835;
code: yfzhang114/r1_reward).

    z_i = (R_i - mean_batch R) / (std_batch R + epsilon)
    A_i = z_i if |z_i| <= sigma_max, else 0

Where almost all rewards are equal, the few others get extreme advantages, which the 3-sigma rule removes. Among n
episodes |z| is at most (n - 1) / sqrt(n), so the filter needs at least 11 episodes to remove one. The method also
limits log-ratios before the exponential, which `log_ratio_max` of the loss `ppo_clip` does, at log 1000.

Deviations: mean and deviation count episodes, where the code counts tokens; the code compares z with the mean of the
unscaled advantages +- 3, and the paper and this file with +- 3. A reward that is not finite is a failure of its scorer
here, and drops the sample, where the code sets the advantage to 0. The published script also subtracts 0.001 times the
divergence from the reference from the reward; here, a loss term `kl` of kind k2 has nearly that gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.trainer.estimators.base import Estimate
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions, Scope

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class StableReinforceOptions(GrpoOptions):
    """Settings of the estimator `stable_reinforce`: those of `grpo` with the scope of the batch, and the filter."""

    mean: Scope = "batch"
    """Members whose mean is subtracted."""
    std: Scope = "batch"
    """Members by whose standard deviation is divided."""
    sigma_max: PositiveFloat = 3.0
    """Largest absolute advantage. A larger one becomes 0."""


class StableReinforce(Grpo):
    """Standardize over the batch, and filter outliers."""

    Options: ClassVar[type[Settings]] = StableReinforceOptions

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: StableReinforceOptions = self.options
        found = super().__call__(batch)
        outside = np.abs(found.advantages) > options.sigma_max
        advantages = np.where(outside, 0.0, found.advantages).astype(np.float32)
        metrics = {
            **found.metrics,
            "outliers": float(batch.first(outside).sum()),
            "advantage_max": float(np.abs(found.advantages).max()),
        }
        return Estimate(advantages=advantages, dropped=found.dropped, metrics=metrics)
