"""Filters groups whose members all earned the same: a group-relative advantage of them is zero everywhere.

Source: dynamic sampling of DAPO (2025-03). A group is judged by the weighted totals of its survivors, the members whose
rewards say something about the model; infra failures are no zeros and are left out. Too few survivors cannot be
compared. With `extend_by`, a group without variance first asks for more episodes (adaptive group size) and is filtered when
`members_max` is reached or time is up.
"""

from __future__ import annotations

import math
from typing import ClassVar

import msgspec

from rollmesh.services.reward.finalizer import Decision, Group, Verdict, total

ZERO_VARIANCE = "ZERO_VARIANCE"
TOO_FEW_SURVIVORS = "TOO_FEW_SURVIVORS"


class ZeroVarianceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the zero-variance finaliser."""

    epsilon: float = 1e-6
    """Totals whose largest and smallest differ by no more than this are the same."""
    survivors_min: int = 2
    """Fewest members with a total that can be compared."""
    extend_by: int = 0
    """Further episodes asked for when there is no variance or too few survive; 0 = filter at once."""
    members_max: int = 64
    """Most episodes of a group, ended ones included, that `extend_by` may reach."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise ValueError(f"epsilon must be finite and >= 0, got {self.epsilon}")
        for name, least in (("survivors_min", 1), ("extend_by", 0), ("members_max", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")


class ZeroVarianceFinalizer:
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = ZeroVarianceOptions

    def __init__(self, *, options: ZeroVarianceOptions) -> None:
        self._options = options

    def decide(self, group: Group) -> Verdict:
        totals = [t for member in group.members if (t := total(member.rewards, group.weights)) is not None]
        if len(totals) < self._options.survivors_min:
            return self._extend_or_filter(group, TOO_FEW_SURVIVORS)
        if len(totals) > 1 and max(totals) - min(totals) <= self._options.epsilon:
            return self._extend_or_filter(group, ZERO_VARIANCE)
        return Verdict(decision=Decision.KEEP)

    def _extend_or_filter(self, group: Group, reason: str) -> Verdict:
        num_members = len(group.members) + group.num_unscored
        num_extend = min(self._options.extend_by, self._options.members_max - num_members)
        if num_extend > 0 and not group.deadline_passed:
            return Verdict(decision=Decision.EXTEND, num_extend=num_extend)
        return Verdict(decision=Decision.FILTER, reason=reason)
