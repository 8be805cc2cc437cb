"""Centered rewards, enlarged by the share of groups without signal (GPG, Chu et al. 2025, arXiv:2504.02546; code:
AMAP-ML/GPG).

    A_i   = alpha (R_i - mean_group R)
    alpha = B / (B - M)        B: samples of the batch, M: those of groups whose rewards all agree

Groups without signal still count in the average of the loss, so that the gradient of a batch shrinks with their number,
and alpha restores it. The loss is the plain policy gradient, - A log pi, without a ratio, a clip, a KL term or a
reference. The authors also draw further prompts until B - M is at least 0.6 B: here the finalizer `zero_variance`
filters such groups and draws others, so that alpha is 1 unless it is replaced by `keep_all`. The metric `alpha` reports
it.

verl counts samples of reward 0 for M (`compute_gpg_outcome_advantage`), which is another alpha than that of paper and
authors' code. B and M are over the scored samples that are trained.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import Estimate, GroupEstimator, GroupSize, centered, episode_weights

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class Gpg(GroupEstimator):
    """See the module."""

    needs_behavior = False
    group_size = GroupSize(least=2)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        found = super().__call__(batch)
        silent = {group.group for group in batch.groups if not any(self.of_group(group).values())}
        scored = [s.group for n, s in enumerate(batch.samples) if n not in found.dropped]
        valid = sum(group not in silent for group in scored)
        alpha = len(scored) / valid if valid else 1.0
        advantages = (alpha * found.advantages).astype(np.float32)
        return Estimate(advantages=advantages, dropped=found.dropped, metrics={"alpha": alpha})

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage with alpha = 1."""
        members, sums = self.reward_sums(group)
        values = centered(sums, episode_weights(members), None)
        return {m.sample_id: a for m, a in zip(members, values.tolist(), strict=True)}
