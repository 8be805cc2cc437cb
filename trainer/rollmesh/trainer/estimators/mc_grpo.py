"""Advantage against the median of the group, for few rollouts per prompt (MC-GRPO, arXiv:2601.22582; code:
lotusroot-kim/MC-GRPO).

    m = median(R),   MAD = median |R - m|,   A_i = (R_i - m) / (MAD + epsilon)

A group has an odd number G + 1 of episodes. The episode that is the median, whose advantage is 0, is the pivot. It is
not trained, so that G episodes are. Why: with few rollouts, one outlier moves the mean so far that other rollouts get
an advantage of the wrong sign.

Deviations: the median is over episodes, whose reward is the mean of their samples'. For an even number of episodes it
is the mean of the two in the middle, where the code takes the lower one, and often no episode is the pivot. With
rewards of 0 and 1 the MAD is often 0, and the formula gives advantages of 1 / epsilon = 1000. Here such a group is only
centered (`zero_mad: center`), and all advantages are limited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import Estimate, GroupEstimator, GroupSize, episode_means

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch

PIVOT = "PIVOT"
"""Reason of a sample that is not trained because its episode is the median of its group."""


class McGrpoOptions(Settings):
    """Settings of the estimator `mc_grpo`."""

    epsilon: PositiveFloat = 1e-3
    """Added to the median absolute deviation."""
    zero_mad: Literal["center", "scale"] = "center"
    """What is done with a group whose median absolute deviation is 0: only `center` it, or `scale` it by 1 /
    epsilon."""
    advantage_max: PositiveFloat = 10.0
    """Largest absolute advantage."""


class McGrpo(GroupEstimator):
    """Center by the median, scale by the median absolute deviation, drop the pivot."""

    Options: ClassVar[type[Settings]] = McGrpoOptions
    group_size = GroupSize(least=3, odd=True)
    """With an even number, often no episode is the median."""
    needs_behavior = False

    def __call__(self, batch: UpdateBatch) -> Estimate:
        estimate = super().__call__(batch)
        numbers: dict[str, list[int]] = {}
        for number, sample in enumerate(batch.samples):
            numbers.setdefault(sample.episode or sample.sample.sample_id, []).append(number)
        pivots: list[int] = []
        for group in batch.groups:
            members, sums = self.reward_sums(group)
            values = episode_means(members, sums)
            median = np.median(list(values.values())) if values else 0.0
            leased = (numbers[e] for e, value in values.items() if value == median and e in numbers)
            pivots += next(leased, [])
        dropped = {**estimate.dropped, **dict.fromkeys(pivots, PIVOT)}
        return Estimate(advantages=estimate.advantages, dropped=dropped, metrics={"pivots": len(pivots)})

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage, also of the pivot."""
        options: McGrpoOptions = self.options
        members, sums = self.reward_sums(group)
        if not members:
            return {}
        episodes = np.array(list(episode_means(members, sums).values()))
        median = np.median(episodes)
        mad = float(np.median(np.abs(episodes - median)))
        scale = 1.0 if mad == 0 and options.zero_mad == "center" else mad + options.epsilon
        values = np.clip((sums - median) / scale, -options.advantage_max, options.advantage_max)
        return {m.sample_id: a for m, a in zip(members, values.tolist(), strict=True)}
