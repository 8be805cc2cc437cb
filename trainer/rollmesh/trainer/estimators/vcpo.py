"""Advantage against the off-policy baseline of least variance (VCPO, arXiv:2602.17616; code: mit-han-lab/vcpo).

    b   = sum_i w_i^2 g_i^2 R_i / sum_i w_i^2 g_i^2      over the samples of a group
    A_i = (R_i - b) / (std R + epsilon)

w_i = product of pi / mu over the trained tokens of sample i, and g_i is the norm of the gradient of the sum of their
log-probs, both under the policy at the start of the update. The norm of the gradient w_i g_i (R_i - b) has the least
expected square for this b. With w = 1 and equal norms, b is the mean of the group. The gradients cost one backward pass
per sample.

The method also scales the learning rate by the effective sample size of w, which the update rule `ess_minibatches`
does.

Deviations: only leased samples have weights and gradients, so b is over them, while the standard deviation is over all
scored members. An episode with several samples has the weight of one. The exponent of w is limited to +-20.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.effective_size import effective_sample_size
from rollmesh.trainer.estimators.base import (
    Estimate,
    GroupEstimator,
    GroupSize,
    centered,
    deviation_of_sums,
    episode_weights,
    spread,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rollmesh.trainer.batch import UpdateBatch


class VcpoOptions(Settings):
    """Settings of the estimator `vcpo`."""

    scale_by_std: bool = True
    """Divide by the standard deviation of the group."""
    importance: bool = True
    """Weigh by w^2 g^2. False weighs by g^2, the baseline of least variance for on-policy samples."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


class Vcpo(GroupEstimator):
    """Center by the baseline of least variance."""

    Options: ClassVar[type[Settings]] = VcpoOptions
    needs = ("proximal", "gradient_square")
    group_size = GroupSize(least=2)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: VcpoOptions = self.options
        weights = sequence_weights(batch)
        squares = batch.first(batch["gradient_square"]).astype(np.float64)
        if options.importance:
            squares = squares * np.square(weights)
        numbers = {s.sample.sample_id: number for number, s in enumerate(batch.samples)}
        scalars: dict[str, float] = {}
        for group in batch.groups:
            members, sums = self.reward_sums(group)
            leased = [i for i, m in enumerate(members) if m.sample_id in numbers]
            if not leased:
                continue
            share = episode_weights([members[i] for i in leased])
            factors = share * squares[[numbers[members[i].sample_id] for i in leased]]
            factors = factors / factors.sum() if factors.sum() > 0 else share
            values = centered(sums[leased], factors, None)
            if options.scale_by_std:
                values = values / (self._deviation(members, sums) + options.epsilon)
            scalars |= {members[i].sample_id: a for i, a in zip(leased, values.tolist(), strict=True)}
        found = spread(batch, scalars)
        metrics = {"sequence_ess": effective_sample_size(weights), "sequence_weight_max": float(weights.max())}
        return Estimate(advantages=found.advantages, dropped=found.dropped, metrics=metrics)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage with equal weights. It is 0 for all members exactly if the advantage is,
        whatever the weights."""
        members, sums = self.reward_sums(group)
        values = centered(sums, episode_weights(members), None)
        if self.options.scale_by_std:
            values = values / (self._deviation(members, sums) + self.options.epsilon)
        return {m.sample_id: a for m, a in zip(members, values.tolist(), strict=True)}

    def _deviation(self, members: Sequence[MemberOutcome], sums: NDArray[np.float64]) -> float:
        return deviation_of_sums(members, sums, episode_weights(members), self.weights)


def sequence_weights(batch: UpdateBatch) -> NDArray[np.float64]:
    """Return [S]: the product of pi / mu over the trained tokens of each sample. Reads the columns `proximal` and
    `behavior`."""
    from rollmesh.trainer.losses.ratio import LOG_RATIO_MAX  # imports torch, which the reward service lacks

    log_weights = batch.sums(batch["proximal"].astype(np.float64) - batch["behavior"])
    weights: NDArray[np.float64] = np.exp(np.clip(log_weights, -LOG_RATIO_MAX, LOG_RATIO_MAX))
    return weights
