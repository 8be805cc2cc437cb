"""Advantage of the weighted reward sum, centered and scaled over the group or over the batch.

GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300):  A_i = (R_i - mean_group R) / (std_group R + epsilon)
Dr. GRPO (Liu et al. 2025, arXiv:2503.20783):             A_i = R_i - mean_group R                               (`std: none`)
Lite PPO (Liu et al. 2025, arXiv:2508.08221):             A_i = (R_i - mean_group R) / (std_batch R + epsilon)   (`std: batch`)

with R_i = sum_n w_n r_n^(i) and population standard deviations: over the scored samples of each episode, then over
episodes, so that an episode with many samples does not set the baseline. For one sample per episode these are the
papers' formulas. "Batch" is all scored members of the groups of the update, trained or not. A lone member has advantage
0 if the mean is that of the group. With `baseline: policy`, a given solution has an advantage, but its reward is in no
mean or standard deviation, as in LUFFY (arXiv:2504.14945) and RL-PLUS. With `drop_truncated`, a sample that a limit of
tokens ended is in mean and deviation, but not in the loss: overlong filtering of DAPO (arXiv:2503.14476). All
estimators with these options do so. Deviation from all: members with an infrastructure failure are not in the mean.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import PositiveFloat, Settings, Share
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, TrainingSample
from rollmesh.trainer.estimators.base import (
    UNDECIDED,
    Estimate,
    GroupEstimator,
    GroupSize,
    centered,
    deviation,
    deviation_of_sums,
    episode_weights,
    spread,
)
from rollmesh.trainer.estimators.truncation import TRUNCATED, is_truncated, last_loop

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch

Scope = Literal["group", "batch", "none"]
REPEATS_MIN = 2
"""Least number of exact repetitions of a loop."""


class GrpoOptions(Settings):
    """Settings of the estimator `grpo`."""

    mean: Scope = "group"
    """Members whose mean is subtracted: those of the `group` or of the whole `batch`. `none` subtracts nothing."""
    std: Scope = "group"
    """Members by whose standard deviation is divided. `none` keeps small differences small. With `batch`, a group whose
    rewards are almost equal does not get large advantages."""
    baseline: Literal["all", "policy"] = "all"
    """Members in mean and standard deviation: `all`, or those that the `policy` sampled, without given solutions.
    Finalizers count all."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation, so that a group whose members agree gets 0, not a division by zero."""
    drop_truncated: bool = False
    """Whether samples that a limit of tokens ended are not trained. Their rewards stay in the mean and the standard
    deviation."""
    loop_share_min: Share = 0.0
    """With `drop_truncated`: a truncated sample is trained nevertheless if at least this share of its last turn is one
    loop at its end, because it would not have finished with more tokens. 0 drops all truncated samples."""

    def check_fields(self) -> None:
        if self.loop_share_min and not self.drop_truncated:
            raise ValueError(
                f"`loop_share_min` must be 0 without drop_truncated, got {self.loop_share_min}: truncated samples are "
                "trained anyway; set `drop_truncated` to true"
            )


class Grpo(GroupEstimator):
    """Center reward sums, and scale them by their standard deviation, over the group or the batch."""

    Options: ClassVar[type[Settings]] = GrpoOptions
    needs_behavior = False

    @property
    def group_size(self) -> GroupSize:
        """A group of one episode has no mean to compare with."""
        return GroupSize(least=2 if self.options.mean == "group" else 1)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        return self.spread(batch, self.of_sums([self.reward_sums(group) for group in batch.groups], self.given(batch)))

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage; not yet divided if the standard deviation is that of the batch, and
        `UNDECIDED` if the mean is."""
        return self.of_rewards(*self.reward_sums(group))

    def of_rewards(self, members: Sequence[MemberOutcome], sums: NDArray[np.float64]) -> dict[str, float]:
        """Return what `of_group` does, for the members of a group and their reward sums."""
        if self.options.mean == "batch":
            return {m.sample_id: UNDECIDED for m in members}
        return self._scaled(members, sums, 0.0, None)

    def spread(self, batch: UpdateBatch, scalars: Mapping[str, float]) -> Estimate:
        """Give every token of a sample its scalar, as `base.spread`. Truncated samples are dropped if the options say
        so."""
        found = spread(batch, scalars)
        options: GrpoOptions = self.options
        if not options.drop_truncated:
            return found
        at = [n for n, sample in enumerate(batch.samples) if self._drops(sample)]
        metrics = {**found.metrics, "truncated_share": len(at) / max(1, len(batch.samples))}
        return replace(found, dropped={**dict.fromkeys(at, TRUNCATED), **found.dropped}, metrics=metrics)

    def _drops(self, sample: TrainingSample) -> bool:
        """Return whether the sample is truncated, and not because it is a loop."""
        least: float = self.options.loop_share_min
        return is_truncated(sample) and not (least and last_loop(sample, REPEATS_MIN) >= least)

    def given(self, batch: UpdateBatch) -> frozenset[str]:
        """Return the ids of the samples that are in no baseline."""
        return given_ids(batch) if self.options.baseline == "policy" else frozenset()

    def of_sums(
        self, scored: Sequence[tuple[list[MemberOutcome], NDArray[np.float64]]], given: Collection[str] = ()
    ) -> dict[str, float]:
        """Return sample id -> advantage, for the members of each group and their reward sums. Those `given` are in no
        baseline."""
        pooled = np.concatenate([np.empty(0), *(sums for _, sums in scored)])
        weights = baseline_weights([m for members, _ in scored for m in members], given)
        mean, std = float(weights @ pooled), deviation(pooled, weights)
        return {i: a for members, sums in scored for i, a in self._scaled(members, sums, mean, std, given).items()}

    def deviation_of(
        self, members: Sequence[MemberOutcome], sums: NDArray[np.float64], weights: NDArray[np.float64]
    ) -> float:
        """Return the standard deviation of the reward sums [n] of a group, given the weights [n] of its members."""
        return deviation_of_sums(members, sums, weights, self.weights)

    def _scaled(
        self,
        members: Sequence[MemberOutcome],
        sums: NDArray[np.float64],
        mean: float,
        std: float | None,
        given: Collection[str] = (),
    ) -> dict[str, float]:
        """Return the advantages of one group. `mean` and `std` are those of the batch."""
        options: GrpoOptions = self.options
        weights = baseline_weights(members, given)
        values = sums - mean if options.mean == "batch" else sums
        if options.mean == "group":
            values = centered(sums, weights, None)
        scale = std if options.std == "batch" else None
        if options.std == "group":
            scale = self.deviation_of(members, sums, weights)
        if scale is not None:
            values = values / (scale + options.epsilon)
        return {m.sample_id: a for m, a in zip(members, values.tolist(), strict=True)}


def given_ids(batch: UpdateBatch) -> frozenset[str]:
    """Return the ids of the samples that the policy did not sample."""
    return frozenset(batch.samples[n].sample.sample_id for n in np.flatnonzero(batch.external).tolist())


def baseline_weights(members: Sequence[MemberOutcome], given: Collection[str]) -> NDArray[np.float64]:
    """Return weights [n] of members in a mean, with sum 1 and 0 for those `given`. All count if all are given."""
    counted = [m for m in members if m.sample_id not in given]
    if not counted or len(counted) == len(members):
        return episode_weights(members)
    own = iter(episode_weights(counted).tolist())
    return np.array([0.0 if m.sample_id in given else next(own) for m in members])
