"""The finalizer port: decides on a group when its members have ended, or when its deadline has passed.

Finalizers are pure: the same group gives the same verdict. They are found by name, or loaded from user code as
`file.py:Name`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import msgspec

from rollmesh.services.reward.item import TaskView
from rollmesh.shared.codec.checks import EXTEND_MAX, REASON_FORM, check_reward_names, check_rewards, is_reason
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.domain.trajectory import MemberOutcome, Reward


class FinalizerDecision(IntEnum):
    """The decision on a group. Numbers equal `rollmesh.v1.GroupDecision`."""

    KEEP = 1
    FILTER = 2
    EXTEND = 3


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A group with every scored member, whether it is trained or not."""

    group: str
    task: TaskView
    members: tuple[MemberOutcome, ...]
    advantages: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Advantage by sample id: the result of the trainer's estimator (`Estimator.of_group`) with `reward.weights`.
    Members without usable rewards, mainly infra failures, are absent."""
    num_unscored: int = 0
    """Number of members that ended without a score: infra failures and cancellations."""
    deadline_passed: bool = False
    """Whether the deadline has passed, so that EXTEND has no effect."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The decision, with `reason` for FILTER (at most 64 characters of A-Z a-z 0-9 _ . : / -) and `num_extend` (at
    least 1) for EXTEND."""

    decision: FinalizerDecision
    reason: str = ""
    num_extend: int = 0
    adjusted: Mapping[str, tuple[Reward, ...]] = msgspec.field(default_factory=dict)
    """Rewards that the finalizer changed, by sample id. Absent samples keep their rewards."""


def checked_verdict(verdict: object) -> Verdict:
    """Return the verdict. Raise TypeError or ValueError for one that no coordinator would record."""
    if not isinstance(verdict, Verdict):
        raise TypeError(f"the finalizer returned a {type(verdict).__name__}, expected a Verdict")
    if verdict.decision not in list(FinalizerDecision):
        raise ValueError(f"`Verdict.decision` must be a FinalizerDecision, got {verdict.decision!r}")
    if not is_reason(verdict.reason):
        raise ValueError(
            f"`Verdict.reason` must {REASON_FORM}, got {verdict.reason[:100]!r}: samples are counted by reason, so "
            "name the case without its numbers"
        )
    if verdict.decision is FinalizerDecision.EXTEND and not 1 <= verdict.num_extend <= EXTEND_MAX:
        raise ValueError(f"`Verdict.num_extend` must be in [1, {EXTEND_MAX}] for EXTEND, got {verdict.num_extend}")
    for sample_id, rewards in verdict.adjusted.items():
        check_rewards(rewards, f"Verdict.adjusted[{sample_id!r}]")
        check_reward_names(rewards)
    return verdict


class Finalizer(Plugin):
    """Base of finalizers. Constructed as `cls(options=...)`, or as `cls()` if the class has no `Options`."""

    @required
    def decide(self, group: Group) -> Verdict:
        """Return the verdict on one group."""
        raise NotImplementedError


FINALIZERS = Registry(
    "finalizer",
    {
        "zero_variance": "rollmesh.services.reward.finalizers.zero_variance:ZeroVarianceFinalizer",
        "look_ahead": "rollmesh.services.reward.finalizers.look_ahead:LookAheadFinalizer",
        "keep_all": "rollmesh.services.reward.finalizers.keep_all:KeepAllFinalizer",
        "band": "rollmesh.services.reward.finalizers.band:BandFinalizer",
    },
    Finalizer,
)
