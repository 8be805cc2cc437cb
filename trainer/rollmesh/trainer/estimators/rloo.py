"""Leave-one-out advantage of whole samples (RLOO, Ahmadian et al. 2024, arXiv:2402.14740).

    R_i <- R_i - kl * sum over the trained tokens of (log prox - log ref)
    A_i  = R_i - mean of R_j over the other members of the group

A sample is one action, so that all of its tokens have one advantage. The mean of the other members does not depend on
the sample, which keeps the gradient unbiased; the mean of all members, as in `grpo` with `std: none`, makes it (n - 1)
/ n as large. `trloo` does the same for each turn. The penalty is that of TRL (`beta`, 0.05) and verl
(`use_kl_in_reward`, 0.001) with the estimate k1; the paper has 0.03. `kl: 0` needs no reference.

The other members are those of other episodes: a mean over the samples of each episode, then over episodes. A member
without others has the advantage 0, as in verl's `rloo_vectorized`; its `rloo` leaves the reward. Members that are not
leased get the mean penalty of their group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, Settings
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import (
    UNDECIDED,
    Estimate,
    GroupEstimator,
    GroupSize,
    adjusted_sums,
    episode_means,
    spread,
)
from rollmesh.trainer.estimators.returns import divergence_of

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class RlooOptions(Settings):
    """Settings of the estimator `rloo`."""

    kl: NonNegativeFloat = 0.0
    """Reward that a sample loses per nat of divergence from the reference. 0 needs no reference."""


class Rloo(GroupEstimator):
    """See the module."""

    Options: ClassVar[type[Settings]] = RlooOptions
    group_size = GroupSize(least=2)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("proximal", "reference") if self.options.kl else ()

    @property
    def needs_behavior(self) -> bool:
        return False

    def __call__(self, batch: UpdateBatch) -> Estimate:
        kl = self.options.kl
        divergence = batch.sums(divergence_of(batch)) if kl else np.zeros(len(batch.samples))
        scalars: dict[str, float] = {}
        for members, sums in adjusted_sums(batch, self.weights, -kl * divergence):
            scalars |= without_own(members, sums)
        found = spread(batch, scalars)
        metrics = {"penalty_mean": float(kl * divergence.mean())} if kl else {}
        return Estimate(advantages=found.advantages, dropped=found.dropped, metrics=metrics)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage without the penalty, or `UNDECIDED` if the penalty alone decides."""
        members, sums = self.reward_sums(group)
        if self.options.kl and len(sums) > 1 and (sums == sums[0]).all():
            return {m.sample_id: UNDECIDED for m in members}
        return without_own(members, sums)


def without_own(members: Sequence[MemberOutcome], sums: NDArray[np.float64]) -> dict[str, float]:
    """Return sample id -> its reward sum minus the mean of those of the other episodes; 0 without others."""
    means = episode_means(members, sums)
    total, count = sum(means.values()), len(means)
    found = {}
    for member, value in zip(members, sums.tolist(), strict=True):
        own = means[member.episode or member.sample_id]
        others = (total - own) / (count - 1) if count > 1 else value
        found[member.sample_id] = 0.0 if (sums == value).all() else value - others
    return found
