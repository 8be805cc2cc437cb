"""GRPO with a length penalty for right answers alone (Arora & Zanette 2025, "Training Language Models to Reason
Efficiently", arXiv:2502.04463).

    R_i <- R_i - length_weight * sigmoid((n_i - mean n) / std n)   if R_i > correct_above,   then the advantages of `grpo`

n is the number of tokens that the policy sampled; mean and deviation are over the right answers of the group, so that
each prompt has its own scale. A wrong answer is not penalized: a penalty for all would make a short wrong answer better
than a long right one, and the policy would learn to skip the work (see the scorer `length`). With length_weight below
the difference of right and wrong rewards, every right answer remains better than every wrong one.

All members have their length in their summary, leased or not. Samples of one episode share its weight in mean and
deviation. Right answers of equal length, and a lone one, lose half of the weight. Groups of right answers of different
lengths have a signal and are kept. The paper's weights are 0 to 0.4. Deviation: one without a summary has no penalty.
"""  # noqa: E501, W505

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, Settings
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import centered, episode_weights
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions


class GatedLengthOptions(GrpoOptions):
    """Settings of the estimator `gated_length`: those of `grpo`, and the penalty."""

    length_weight: NonNegativeFloat = 0.1
    """Largest reward that a right answer loses (alpha)."""
    correct_above: float = 0.5
    """An answer is right if its weighted reward sum is larger."""


class GatedLength(Grpo):
    """Subtract the penalty from the rewards of right answers."""

    Options: ClassVar[type[Settings]] = GatedLengthOptions

    def reward_sums(self, group: GroupContext) -> tuple[list[MemberOutcome], NDArray[np.float64]]:
        """Return the members with usable rewards, and the reward sum of each minus its penalty."""
        members, sums = super().reward_sums(group)
        options: GatedLengthOptions = self.options
        lengths = np.array([m.summary.num_tokens for m in members], dtype=np.float64)
        right = np.flatnonzero((sums > options.correct_above) & (lengths > 0))
        if len(right):
            scaled = centered(lengths[right], episode_weights([members[i] for i in right]), options.epsilon)
            sums = sums.copy()
            sums[right] -= options.length_weight / (1.0 + np.exp(-scaled))
        return members, sums
