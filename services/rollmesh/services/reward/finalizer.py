"""The finalizer port: decides on a group when its members have ended, or when its deadline has passed.

The finalizers of a run form a list. Each sees the group that the earlier ones left. Finalizers are pure: the same group
gives the same verdict. They are found by name, or loaded from user code as `file.py:Name`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

import msgspec

from rollmesh.services.reward.item import TaskView
from rollmesh.shared.codec.checks import (
    EXTEND_MAX,
    REASON_FORM,
    WORD_FORM,
    check_reward_names,
    check_rewards,
    is_reason,
    is_word,
)
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.domain.trajectory import MemberOutcome, Reward


class FinalizerDecision(IntEnum):
    """The decision on a group. Numbers equal `rollmesh.v1.GroupDecision`."""

    KEEP = 1
    FILTER = 2
    EXTEND = 3


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A group with every scored member, whether it is trained or not, except those that earlier finalizers dropped."""

    group: str
    task: TaskView
    members: tuple[MemberOutcome, ...]
    """With the rewards that earlier finalizers adjusted."""
    dropped: tuple[MemberOutcome, ...] = ()
    """Members that earlier finalizers dropped. They still count in the baseline, and their `end` has the reason."""
    advantages: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Advantage by sample id: the result of the trainer's estimator (`Estimator.of_group`) with `reward.weights` and
    the baseline of all scored members, for those in `members`. Members without usable rewards, mainly infra failures,
    are absent."""
    num_unscored: int = 0
    """Number of members that ended without a score: infra failures and cancellations."""
    deadline_passed: bool = False
    """Whether the deadline has passed, so that EXTEND has no effect."""
    num_extend_max: int = EXTEND_MAX
    """Number of further episodes that the group may get. More are reduced to it; if it is 0, EXTEND has no effect."""
    propensity: float = 0.0
    """Probability with which the selector drew the group; 0: it did not state it."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The decision of one finalizer, with `reason` for FILTER (at most 64 characters of A-Z a-z 0-9 _ . : / -) and
    `num_extend` (at least 1) for EXTEND. After KEEP the next finalizer decides."""

    decision: FinalizerDecision
    reason: str = ""
    num_extend: int = 0
    adjusted: Mapping[str, tuple[Reward, ...]] = msgspec.field(default_factory=dict)
    """Rewards that the finalizer changed, by sample id. Absent samples keep their rewards. They have no effect if the
    group gets more episodes, because the finalizers then decide on the larger group."""
    dropped: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Reasons (1 to 64 characters of the same kind) of the members that end as filtered before any lease, by sample id.
    They stay in the context of the group and count in its baseline. They have no effect if the group gets more
    episodes, as with `adjusted`."""


def checked_verdict(verdict: object, group: Group) -> Verdict:
    """Return the verdict on a group. Raise TypeError or ValueError for one that no coordinator would record."""
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
    _check_dropped(verdict.dropped, group)
    return verdict


def _check_dropped(dropped: object, group: Group) -> None:
    if not isinstance(dropped, Mapping):
        raise TypeError(
            f"`Verdict.dropped` must be a mapping from sample id to reason, got a {type(dropped).__name__}; write "
            '{member.sample_id: "REASON"}'
        )
    members = {member.sample_id for member in group.members}
    for sample_id, reason in dropped.items():
        if sample_id not in members:
            before = any(member.sample_id == sample_id for member in group.dropped)
            raise ValueError(
                "`Verdict.dropped` must name members of `group.members` by `sample_id`, got "
                f"{str(sample_id)[:100]!r}{', which an earlier finalizer dropped' if before else ''}; remove it"
            )
        if not isinstance(reason, str) or not is_word(reason):
            raise ValueError(
                f"`Verdict.dropped[{sample_id!r}]` must {WORD_FORM}, got {str(reason)[:100]!r}: samples are counted by "
                "reason, so name the case without its numbers"
            )


class Finalizer(Plugin):
    """Base of finalizers. Constructed as `cls(options=...)`, or as `cls()` if the class has no `Options`."""

    @required
    def decide(self, group: Group) -> Verdict:
        """Return the verdict on one group. `group.members` is not empty."""
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
