"""Sample further episodes for a group while one more is worth its cost: the stop rule of V0.5 (2026-03,
arXiv:2603.10848), for the estimator `v05`, which states the symbols.

    e(n)   = s2 D2 / (s2 + D2),   s2 = ((high - low) / 2)^2 / n         expected squared error of the baseline of n episodes
    D2     = max(0, (m - V)^2 - s2) at the present n
    extend   if e(n) - e(n + 1) > cost ((high - low) / 2)^2, and keep else

So a group whose mean agrees with the prior V is kept at once, because D2 is 0, and one that contradicts it grows until
another episode gains less than its cost: with the default cost of 1/256 no group grows beyond 16 episodes, whatever the
prior. A group without a prior is kept. The coordinator keeps a group at four times the size with which it began.

The rule looks one step ahead, as the paper does (4 episodes at first, at most 16, cost 0.0039 for rewards of -1 and 1;
from a public summary, since neither code nor text was at hand). That D2 is held fixed for the step is a choice of this
project. `extend_by` requests several episodes at a time, which costs less waiting.
"""  # noqa: E501, W505

from __future__ import annotations

from typing import ClassVar

import msgspec

from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Group, Verdict
from rollmesh.shared.config.settings import NonNegativeFloat, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.v05 import V05, V05Options, error_of_baseline


class LookAheadOptions(Settings):
    """Settings of the finalizer `look_ahead`. `prior`, `low` and `high` are those of the estimator `v05`."""

    prior: str = "prior"
    """Name of the reward that predicts the value of the prompt."""
    low: float = 0.0
    """Smallest possible weighted sum of rewards."""
    high: float = 1.0
    """Largest possible weighted sum of rewards."""
    weights: dict[str, float] = {}
    """Weights of the rewards beside the prior, as in `reward.weights`. Empty: every reward has weight 1."""
    cost: NonNegativeFloat = 1 / 256
    """Least gain for which one more episode is sampled, in units of ((high - low) / 2)^2."""
    extend_by: PositiveInt = 1
    """Number of episodes that are requested at a time."""
    members_max: PositiveInt = 16
    """Largest number of episodes of a group, including those that ended without a score."""

    def check_fields(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"`low` must be < high = {self.high}, got {self.low}")


class LookAheadFinalizer(Finalizer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = LookAheadOptions

    def __init__(self, *, options: LookAheadOptions) -> None:
        self._options = options
        settings = V05Options(prior=options.prior, low=options.low, high=options.high)
        self._estimator = V05(weights=options.weights, options=settings)

    def decide(self, group: Group) -> Verdict:
        episodes = {m.episode or m.sample_id for m in (*group.members, *group.dropped)}
        room = min(self._options.members_max - len(episodes) - group.num_unscored, group.num_extend_max)
        if room > 0 and not group.deadline_passed and self._is_worth_it(group):
            return Verdict(decision=FinalizerDecision.EXTEND, num_extend=min(self._options.extend_by, room))
        return Verdict(decision=FinalizerDecision.KEEP)

    def _is_worth_it(self, group: Group) -> bool:
        members = (*group.members, *group.dropped)
        context = GroupContext(group=group.group, task=group.task.task_id, members=members)
        found = self._estimator.mean_and_prior(context)
        if found is None:
            return False
        scale = ((self._options.high - self._options.low) / 2) ** 2
        now, then = (error_of_baseline(*found, ahead, scale) for ahead in (0, 1))
        return now - then > self._options.cost * scale
