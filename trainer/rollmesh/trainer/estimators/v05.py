"""Baseline between the mean of the group and a predicted value (V0.5, 2026-03, arXiv:2603.10848), for few rollouts per
prompt.

The prediction V arrives as a reward of the name `prior`, which a scorer computes from the prompt alone. It is never
optimized, whatever its weight. With n episodes, their mean reward m, and the true mean mu of the prompt, the baseline b
= w m + (1 - w) V has

    E (b - mu)^2 = w^2 s2 + (1 - w)^2 D2,   s2 = E (m - mu)^2,   D2 = (V - mu)^2

which is smallest for w = D2 / (D2 + s2). Both are unknown. s2 is replaced by its largest possible value for rewards
within [low, high], and because E (m - V)^2 = D2 + s2, D2 is estimated by the positive part of (m - V)^2 - s2:

    s2 = ((high - low) / 2)^2 / n,   D2 = max(0, (m - V)^2 - s2),   w = max(0, 1 - s2 / (m - V)^2),   A = R - b

So V is the baseline while m is within one standard error of it, which is a test of V, and its weight 1 - w = s2 / (m -
V)^2 vanishes where they disagree by much more. With a prior, a group whose rewards agree has a gradient. Without one,
the baseline is m. R is the weighted sum of the other rewards, and means are over episodes. A is not divided by a
standard deviation.

The finalizer `look_ahead` decides, by the expected gain of one more rollout, whether to sample further ones. The metric
`conflict_share` is the share of groups in which D2 > 0. Any scorer may give the prior; the paper's is a pretrained
model for any policy (V0), which is not part of this project.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import (
    Estimate,
    GroupEstimator,
    centered,
    episode_weights,
    spread,
    usable_rewards,
    without_reward,
)

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class V05Options(Settings):
    """Settings of the estimator `v05`."""

    prior: str = "prior"
    """Name of the reward that predicts the value of the prompt, in units of the weighted sum of the other rewards."""
    low: float = 0.0
    """Smallest possible weighted sum of rewards."""
    high: float = 1.0
    """Largest possible weighted sum of rewards."""

    def check_fields(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"`low` must be < high = {self.high}, got {self.low}")


class V05(GroupEstimator):
    """Shrink the mean of the group towards the prior."""

    Options: ClassVar[type[Settings]] = V05Options
    needs_behavior = False

    @property
    def rewards(self) -> tuple[str, ...]:
        return (self.options.prior,)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        found: dict[str, float] = {}
        weights: list[float] = []
        for group in batch.groups:
            advantages, prior_weight = self._of(group)
            found |= advantages
            if prior_weight is not None:
                weights.append(prior_weight)
        metrics = {
            "prior_share": len(weights) / max(1, len(batch.groups)),
            "prior_weight_mean": float(np.mean(weights)) if weights else 0.0,
            "conflict_share": float(np.mean([w < 1 for w in weights])) if weights else 0.0,
        }
        estimate = spread(batch, found)
        return Estimate(advantages=estimate.advantages, dropped=estimate.dropped, metrics=metrics)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage."""
        return self._of(group)[0]

    def _of(self, group: GroupContext) -> tuple[dict[str, float], float | None]:
        """Return the advantages, and the weight of the prior, or None without one."""
        members, sums, prior = self._scored(group)
        if not members:
            return {}, None
        values, prior_weight = centered(sums, episode_weights(members), None), None
        if prior is not None:
            prior_weight = weight_of_prior(*_mean(members, sums, prior), self.options)
            values = (1 - prior_weight) * values + prior_weight * (sums - prior)
        return {m.sample_id: a for m, a in zip(members, values.tolist(), strict=True)}, prior_weight

    def mean_and_prior(self, group: GroupContext) -> tuple[float, float, int] | None:
        """Return the mean reward of the episodes of a group, its prior, and the number of episodes; None without
        one."""
        members, sums, prior = self._scored(group)
        return None if prior is None or not members else _mean(members, sums, prior)

    def _scored(self, group: GroupContext) -> tuple[list[MemberOutcome], NDArray[np.float64], float | None]:
        """Return the members that have usable rewards beside the prior, their sums without it, and the mean prior of
        the group."""
        usable = [(m, r) for m in group.members if (r := usable_rewards(m)) is not None]
        priors = [(m, r[self.options.prior]) for m, r in usable if self.options.prior in r]
        members, sums = self.reward_sums(without_reward(group, self.options.prior))
        prior = None
        if priors:
            prior = float(episode_weights([m for m, _ in priors]) @ np.array([value for _, value in priors]))
        return members, sums, prior


def _mean(members: list[MemberOutcome], sums: NDArray[np.float64], prior: float) -> tuple[float, float, int]:
    """Return the mean over the episodes of the members, the prior, and the number of episodes."""
    return float(episode_weights(members) @ sums), prior, len({m.episode or m.sample_id for m in members})


def error_of_baseline(mean: float, prior: float, num: int, ahead: int, scale: float) -> float:
    """Return the expected squared error of the baseline of `num + ahead` episodes, given the mean of `num` and the
    largest variance of a reward, `scale`."""
    bias, noise = max(0.0, (mean - prior) ** 2 - scale / num), scale / (num + ahead)
    return noise * bias / (noise + bias)


def weight_of_prior(mean: float, prior: float, num: int, options: V05Options) -> float:
    """Return 1 - w, the weight of the prior in the baseline, for the mean reward of `num` episodes."""
    noise = ((options.high - options.low) / 2) ** 2 / num
    squared = (mean - prior) ** 2
    return noise / squared if squared > noise else 1.0
