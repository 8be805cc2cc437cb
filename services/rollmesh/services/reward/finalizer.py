"""The finaliser port: what becomes of a group when its members have ended, or its deadline has passed.

Finalisers are pure: the same group gives the same verdict. They are found by name, or loaded from a user's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from rollmesh.services.reward.item import TaskView
from rollmesh.shared.registry import Registry
from rollmesh.shared.trajectory import MemberOutcome, Reward


class FinalizerDecision(IntEnum):
    """What becomes of a group. Numbers equal `rollmesh.v1.GroupDecision`."""

    KEEP = 1
    FILTER = 2
    EXTEND = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A group to decide on: every scored member, trained or not."""

    group: str
    task: TaskView
    members: tuple[MemberOutcome, ...]
    advantages: Mapping[str, float] = field(default_factory=dict)
    """Sample id -> what the trainer's estimator makes of the member's rewards (`Estimator.of_group`), weighted by
    `reward.weights`. Members without usable rewards, above all those of an infra failure, are absent."""
    num_unscored: int = 0
    """Members that ended without a score: infra failures, cancellations."""
    deadline_passed: bool = False
    """No more time: EXTEND would be in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision, with `reason` for FILTER and `num_extend` (at least 1) for EXTEND."""

    decision: FinalizerDecision
    reason: str = ""
    num_extend: int = 0
    adjusted: Mapping[str, tuple[Reward, ...]] = field(default_factory=dict)
    """Rewards changed by looking at the whole group, by sample id; absent samples keep theirs."""


class Finalizer(Protocol):
    """Constructed as `cls(options=...)` with an instance of its class attribute `Options`, or as `cls()` if it has none."""

    def decide(self, group: Group) -> Verdict:
        """Decides on one group."""


FINALIZERS = Registry(
    "finaliser",
    {
        "zero_variance": "rollmesh.services.reward.finalizers.zero_variance:ZeroVarianceFinalizer",
        "keep_all": "rollmesh.services.reward.finalizers.keep_all:KeepAllFinalizer",
    },
)
