"""Advantage of whole turns from the critic of ArCHer (2024, arXiv:2402.19446), for the loss term `archer`, which trains
it.

    A = min(Q_1, Q_2)(s, a) - min(V_1, V_2)(s)        for all tokens of the turn a in the state s

under the critic and the policy at the start of the update. In the first `warmup_updates` updates A is 0, so that only
the critic is trained; the published code does not change the policy for 20 rounds. No baseline and no normalization, so
it needs no group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rollmesh.shared.config.settings import NonNegativeInt, Settings
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import Estimate, GroupEstimator, spread, undecided

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class TurnCriticOptions(Settings):
    """Settings of the estimator `archer`."""

    warmup_updates: NonNegativeInt = 20
    """Updates in which all advantages are 0 and only the critic is trained."""


class TurnCritic(GroupEstimator):
    """See the module."""

    Options: ClassVar[type[Settings]] = TurnCriticOptions
    needs = ("archer_values",)
    needs_behavior = False

    def __call__(self, batch: UpdateBatch) -> Estimate:
        scalars = {name: value for group in batch.groups for name, value in self.of_group(group).items()}
        dropped = spread(batch, scalars).dropped
        q, v = batch["archer_values"].T.astype(np.float64)
        metrics = {"q_mean": float(q.mean()), "v_mean": float(v.mean()), "advantage_abs": float(np.abs(q - v).mean())}
        warm = batch.update > self.options.warmup_updates
        return Estimate(advantages=((q - v) * warm).astype(np.float32), dropped=dropped, metrics=metrics)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return `UNDECIDED` for each member with usable rewards, because the critic decides."""
        return undecided(group)
