"""Filter groups in which every advantage is zero, because nothing can be learned from them.

Source: dynamic sampling of DAPO (2025-03). The estimator of the trainer gives the advantages of the survivors, which
are the members with usable rewards. Infra failures are not zeros and are omitted. Too few survivors cannot be compared.
With `extend_by`, a group without variance first gets more episodes (adaptive group size). It is filtered when
`members_max` or four times the size with which it began is reached, or its deadline has passed.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Group, Verdict
from rollmesh.shared.config.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Settings

ZERO_VARIANCE = "ZERO_VARIANCE"
TOO_FEW_SURVIVORS = "TOO_FEW_SURVIVORS"


class ZeroVarianceOptions(Settings):
    """Settings of the zero-variance finalizer."""

    epsilon: NonNegativeFloat = 1e-6
    """Maximum absolute value of an advantage that counts as zero."""
    survivors_min: PositiveInt = 2
    """Minimum number of members with usable rewards."""
    extend_by: NonNegativeInt = 0
    """Number of episodes added to a group without variance or with too few survivors. 0 filters it at once."""
    members_max: PositiveInt = 64
    """Maximum number of episodes of a group, including ended ones, that `extend_by` may reach."""


class ZeroVarianceFinalizer(Finalizer):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = ZeroVarianceOptions

    def __init__(self, *, options: ZeroVarianceOptions) -> None:
        self._options = options

    def decide(self, group: Group) -> Verdict:
        if len(group.advantages) < self._options.survivors_min:
            return self._extend_or_filter(group, TOO_FEW_SURVIVORS)
        if all(abs(advantage) <= self._options.epsilon for advantage in group.advantages.values()):
            return self._extend_or_filter(group, ZERO_VARIANCE)
        return Verdict(decision=FinalizerDecision.KEEP)

    def _extend_or_filter(self, group: Group, reason: str) -> Verdict:
        num_members = len(group.members) + len(group.dropped) + group.num_unscored
        num_extend = min(self._options.extend_by, self._options.members_max - num_members, group.num_extend_max)
        if num_extend > 0 and not group.deadline_passed:
            return Verdict(decision=FinalizerDecision.EXTEND, num_extend=num_extend)
        return Verdict(decision=FinalizerDecision.FILTER, reason=reason)
