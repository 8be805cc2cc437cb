"""Filters groups in which every advantage is zero: there is nothing to learn from them.

Source: dynamic sampling of DAPO (2025-03). A group is judged by the advantages that the trainer's own estimator gives its survivors,
the members whose rewards say something about the model; infra failures are no zeros and are left out. Too few survivors cannot be
compared. With `extend_by`, a group without variance first asks for more episodes (adaptive group size) and is filtered when
`members_max` is reached or time is up.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from rollmesh.services.reward.finalizer import FinalizerDecision, Group, Verdict
from rollmesh.shared.settings import NonNegativeFloat, NonNegativeInt, PositiveInt, Settings

ZERO_VARIANCE = "ZERO_VARIANCE"
TOO_FEW_SURVIVORS = "TOO_FEW_SURVIVORS"


class ZeroVarianceOptions(Settings):
    """Settings of the zero-variance finaliser."""

    epsilon: NonNegativeFloat = 1e-6
    """Advantages whose absolute value is at most this count as zero."""
    survivors_min: PositiveInt = 2
    """Fewest members with rewards that can be compared."""
    extend_by: NonNegativeInt = 0
    """Further episodes asked for when there is no variance or too few survive; 0 = filter at once."""
    members_max: PositiveInt = 64
    """Most episodes of a group, ended ones included, that `extend_by` may reach."""


class ZeroVarianceFinalizer:
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
        num_members = len(group.members) + group.num_unscored
        num_extend = min(self._options.extend_by, self._options.members_max - num_members)
        if num_extend > 0 and not group.deadline_passed:
            return Verdict(decision=FinalizerDecision.EXTEND, num_extend=num_extend)
        return Verdict(decision=FinalizerDecision.FILTER, reason=reason)
