"""Filter groups whose success rate is outside a band: too hard or too easy for the current policy.

After balanced online difficulty filtering (arXiv:2504.03380): the expected improvement of an update is bounded below by
a term in p (1 - p), the variance of the success rate p of a prompt, so that prompts near 1/2 teach most. Sampling goes
on until the batch is full of accepted groups, which the coordinator does for every filtered group. No code of the paper
was found.

    p = mean over the episodes of the group of `reward`          keep if low <= p <= high, else TOO_HARD or TOO_EASY

Units: p is a rate in [0, 1], measured on the members that are scored for training. Infra failures are omitted, samples
of one episode count once together, and a greedy sample does not count, because it is a baseline.

Deviations. The paper compares several symmetric bands; which one it recommends is not established; configuration. The
default [0.2, 0.8] is a choice of this project. The paper discards surplus groups of its asynchronous sampling; here
accepted groups beyond the batch stay for the next one, within `run.max_staleness`. The share of rejected groups follows
from `rollmesh_coordinator_samples_by_reason`, which counts samples by `filtered/TOO_HARD` and `filtered/TOO_EASY`.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import numpy as np

from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Group, Verdict
from rollmesh.services.reward.finalizers.zero_variance import TOO_FEW_SURVIVORS
from rollmesh.shared.config.settings import NonEmptyStr, PositiveInt, Settings, Share
from rollmesh.shared.domain.trajectory import WHOLE_SAMPLE, Outcome
from rollmesh.trainer.estimators.base import episode_means

TOO_HARD = "TOO_HARD"
TOO_EASY = "TOO_EASY"


class BandOptions(Settings):
    """Settings of the band finalizer."""

    low: Share = 0.2
    """Smallest success rate of a kept group."""
    high: Share = 0.8
    """Largest success rate of a kept group."""
    reward: NonEmptyStr = "correct"
    """Reward that is the success of a member, with values in [0, 1]."""
    survivors_min: PositiveInt = 2
    """Minimum number of episodes with this reward."""

    def check_fields(self) -> None:
        if self.low > self.high:
            raise ValueError(f"`low` must be <= high = {self.high}, got {self.low}")


class BandFinalizer(Finalizer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = BandOptions

    def __init__(self, *, options: BandOptions) -> None:
        self._options = options

    def decide(self, group: Group) -> Verdict:
        values = {
            member.sample_id: reward.value
            for member in group.members
            for reward in member.rewards
            if reward.name == self._options.reward
            and reward.segment == WHOLE_SAMPLE
            and reward.outcome is Outcome.OK
            and member.sample_id in group.advantages
            and not member.summary.greedy
        }
        members = [member for member in group.members if member.sample_id in values]
        rates = episode_means(members, np.array([values[member.sample_id] for member in members]))
        if len(rates) < self._options.survivors_min:
            return Verdict(decision=FinalizerDecision.FILTER, reason=TOO_FEW_SURVIVORS)
        rate = float(np.mean(list(rates.values())))
        if self._options.low <= rate <= self._options.high:
            return Verdict(decision=FinalizerDecision.KEEP)
        return Verdict(decision=FinalizerDecision.FILTER, reason=TOO_HARD if rate < self._options.low else TOO_EASY)
