"""REINFORCE by outcome: a small weight for correct samples, and -1 for wrong ones (2025-06, arXiv:2506.01347; code:
TianHongZXY/RLVR-Decomposed).

    A = positive    if R > threshold       W-REINFORCE: positive = 0.1, negative = 1
    A = -negative   otherwise              NSR: positive = 0, PSR: negative = 0

No baseline and no normalization, so it needs no group. Why: penalizing errors moves probability to other answers in
proportion to what the policy already believes and keeps its entropy, while rewarding correct samples sharpens it.
Deviation: the published code adds advantages of rewards of exactly 0 and 1; here any R is on one side of the threshold.
"""

from __future__ import annotations

from typing import ClassVar

from rollmesh.shared.config.settings import NonNegativeFloat, Settings
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import GroupEstimator


class WReinforceOptions(Settings):
    """Settings of the estimator `w_reinforce`."""

    positive: NonNegativeFloat = 0.1
    """Advantage of a correct sample (lambda)."""
    negative: NonNegativeFloat = 1.0
    """Minus the advantage of a wrong sample."""
    threshold: float = 0.5
    """A sample is correct if its weighted reward sum is larger."""

    def check_fields(self) -> None:
        if not self.positive and not self.negative:
            raise ValueError("`positive` or `negative` must be > 0, got 0 for both")


class WReinforce(GroupEstimator):
    """See the module."""

    Options: ClassVar[type[Settings]] = WReinforceOptions
    needs_behavior = False

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage."""
        options: WReinforceOptions = self.options
        members, sums = self.reward_sums(group)
        return {
            m.sample_id: options.positive if value > options.threshold else -options.negative
            for m, value in zip(members, sums.tolist(), strict=True)
        }
