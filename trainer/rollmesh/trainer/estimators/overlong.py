"""GRPO with the soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.4; code: verl reward
manager `dapo`, TRL `get_soft_overlong_punishment`).

    R_i <- R_i - weight * min(max(n_i - (limit - buffer), 0) / buffer, 1),   then the advantages of `grpo`

n is the number of tokens of the sample that the policy sampled. Below limit - buffer there is no punishment; in the
buffer it grows linearly, so that responses do not end abruptly at the limit; at the limit it is whole. The source has
rewards of 1 and -1 and a weight of 1, which is a weight of 0.5 for rewards of 1 and 0.

All members have their length in their summary, leased or not; one without a summary is not punished. As in the source,
groups are filtered by their rewards without the punishment, so that a group of right answers is not kept because of its
lengths alone; a scorer would keep it. Deviation: verl's punishment has no upper bound, because its responses end at the
limit.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import reward_sums
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions


class OverlongOptions(GrpoOptions):
    """Settings of the estimator `overlong`: those of `grpo`, and the punishment."""

    limit_tokens: PositiveInt = 20480
    """Length from which the punishment is whole, in sampled tokens: the longest possible response."""
    buffer_tokens: PositiveInt = 4096
    """Length of the range below the limit in which the punishment grows."""
    overlong_weight: NonNegativeFloat = 1.0
    """Reward that a response at the limit loses."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.buffer_tokens > self.limit_tokens:
            raise ValueError(f"`buffer_tokens` must be <= limit_tokens = {self.limit_tokens}, got {self.buffer_tokens}")


class Overlong(Grpo):
    """Subtract the punishment from the reward."""

    Options: ClassVar[type[Settings]] = OverlongOptions

    def reward_sums(self, group: GroupContext) -> tuple[list[MemberOutcome], NDArray[np.float64]]:
        """Return the members with usable rewards, and the reward sum of each minus the punishment."""
        members, sums = super().reward_sums(group)
        options: OverlongOptions = self.options
        lengths = np.array([m.summary.num_tokens for m in members], dtype=np.float64)
        excess = (lengths - (options.limit_tokens - options.buffer_tokens)) / options.buffer_tokens
        return members, sums - options.overlong_weight * np.clip(excess, 0.0, 1.0)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage without the punishment, by which groups are filtered."""
        return self.of_rewards(*reward_sums(group, self.weights))
