"""No advantages: for losses of given tokens, such as supervised fine-tuning, which do not read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import UNDECIDED, Estimate, Estimator

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.batch import UpdateBatch


class NoAdvantage(Estimator):
    """Every advantage is 0, and no sample is dropped, also without a reward. It has no options."""

    needs_behavior = False

    def __init__(self, *, weights: Mapping[str, float], options: Any = None) -> None:
        del weights, options

    def of_group(self, group: GroupContext) -> dict[str, float]:
        return {member.sample_id: UNDECIDED for member in group.members}

    def __call__(self, batch: UpdateBatch) -> Estimate:
        return Estimate(advantages=np.zeros(int(batch.lengths.sum()), np.float32))
