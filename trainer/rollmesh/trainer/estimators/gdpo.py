"""Group reward-decoupled normalization (GDPO, arXiv:2601.05242; code: NVlabs/GDPO, verl
`compute_gdpo_outcome_advantage`).

For each reward n within a group:   A_n^(i) = (r_n^(i) - mean_j r_n^(j)) / (std_j r_n^(j) + epsilon)
Weighted sum over the rewards:      A^(i)   = sum_n w_n A_n^(i)
Whitened over the whole batch:      A       = (A - mean_batch A) / (std_batch A + epsilon)

Why: GRPO divides the *sum* by its std, so where the main rewards agree, the remaining small difference (a length reward
of weight 0.1) becomes a full-size advantage. Here 0.1 stays 0.1. Population standard deviations throughout. Means and
standard deviations count every episode once, shared by its samples. Choices the paper leaves open: "batch" is all
scored members of the groups given, trained or not; a member without reward n gets 0 from it. `scale_by_std = false`
drops the per-reward division and the division of the whitening.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import (
    Estimate,
    GroupEstimator,
    GroupSize,
    centered,
    episode_weights,
    spread,
    usable_rewards,
)

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class GdpoOptions(Settings):
    """Settings of the estimator `gdpo`."""

    scale_by_std: bool = True
    """Divide by standard deviations, of each reward in its group and of the batch. False only centers."""
    epsilon: PositiveFloat = 1e-6
    """Added to standard deviations, so that a group whose members agree gets 0, not a division by zero."""


class Gdpo(GroupEstimator):
    """Normalize each reward in the group, add them by weight, whiten over the batch."""

    Options: ClassVar[type[Settings]] = GdpoOptions
    group_size = GroupSize(least=2)
    needs_behavior = False

    def __call__(self, batch: UpdateBatch) -> Estimate:
        raw = {g.group: self.of_group(g) for g in batch.groups}
        scored = [(g.group, m) for g in batch.groups for m in g.members if m.sample_id in raw[g.group]]
        pooled = np.array([raw[group][m.sample_id] for group, m in scored], dtype=np.float64)
        whitened = centered(pooled, episode_weights([m for _, m in scored]), self._epsilon)
        return spread(batch, {m.sample_id: a for (_, m), a in zip(scored, whitened.tolist(), strict=True)})

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> weighted sum of per-reward normalized rewards, before whitening."""
        usable = [(m, r) for m in group.members if (r := usable_rewards(m)) is not None]
        result = {m.sample_id: 0.0 for m, _ in usable}
        for name in sorted({n for _, r in usable for n in r}):
            having = [(m, r[name]) for m, r in usable if name in r]
            values = np.array([value for _, value in having], dtype=np.float64)
            normalized = centered(values, episode_weights([m for m, _ in having]), self._epsilon)
            for (member, _), advantage in zip(having, normalized.tolist(), strict=True):
                result[member.sample_id] += self.weight_of(name) * advantage
        return result

    @property
    def _epsilon(self) -> float | None:
        return self.options.epsilon if self.options.scale_by_std else None
