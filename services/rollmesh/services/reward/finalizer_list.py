"""Decide on a group with the finalizers of a run, one after the other.

The first FILTER or EXTEND decides. An EXTEND by more than `Group.num_extend_max` is reduced to it. If this is 0, or the
deadline has passed, EXTEND means KEEP, so the next finalizer decides. Drops and adjusted rewards accumulate: each
finalizer sees the group without the members that earlier ones dropped, with the rewards that they adjusted, and with
the advantages that follow from them. An EXTEND that has an effect discards both, because all finalizers decide on the
larger group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import structs

from rollmesh.services.reward.finalizer import Finalizer, FinalizerDecision, Group, Verdict, checked_verdict
from rollmesh.services.reward.scorer_run import CAUSE_CHARS_MAX
from rollmesh.shared.config.user_code import explain, user_traceback
from rollmesh.shared.domain.text import short_labels
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Reward
from rollmesh.shared.errors import GroupCodeFailed

FRAMES_CHARS_MAX = 900
"""Maximum length of the frames of a GroupCodeFailed. With the cause they fit in the message of a gRPC status."""
A = TypeVar("A")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredFinalizer:
    """A finalizer with the name that errors show."""

    name: str
    finalizer: Finalizer


def decide(
    finalizers: Sequence[ConfiguredFinalizer], group: Group, advantages: Callable[[GroupContext], dict[str, float]]
) -> Verdict:
    """Return the verdict of all finalizers on a group. `advantages` is the estimator, for rewards that they adjust.

    Raise GroupCodeFailed if one of them raises, or returns an invalid verdict.
    """
    verdict = Verdict(decision=FinalizerDecision.KEEP)
    dropped: dict[str, str] = {}
    adjusted: dict[str, tuple[Reward, ...]] = {}
    values = group.advantages
    for one in finalizers:
        if verdict.adjusted:
            values = advantages(_context(group, adjusted))
        seen = _seen(group, dropped, adjusted, values)
        verdict = call_group_code(f"finalizer {one.name}", _checked(one.finalizer), seen)
        if verdict.decision is FinalizerDecision.EXTEND:
            if num_extend := min(verdict.num_extend, 0 if group.deadline_passed else group.num_extend_max):
                return Verdict(decision=FinalizerDecision.EXTEND, num_extend=num_extend)
            verdict = structs.replace(verdict, decision=FinalizerDecision.KEEP, reason="", num_extend=0)
        dropped.update(verdict.dropped)
        adjusted.update(verdict.adjusted)
        if verdict.decision is FinalizerDecision.FILTER or len(dropped) == len(group.members):
            break
    return structs.replace(verdict, dropped=dropped, adjusted=adjusted)


def call_group_code(what: str, function: Callable[[A], R], group: A) -> R:
    """Return the result of a user's function of a group. Raise GroupCodeFailed with the error and the user's lines if
    it raises."""
    try:
        return function(group)
    except Exception as error:
        frames = user_traceback(error)[-FRAMES_CHARS_MAX:]
        raise GroupCodeFailed(f"{what}: {' '.join(explain(error).split())[:CAUSE_CHARS_MAX]}\n{frames}") from error


def _checked(finalizer: Finalizer) -> Callable[[Group], Verdict]:
    return lambda group: checked_verdict(finalizer.decide(group), group)


def _seen(
    group: Group,
    dropped: Mapping[str, str],
    adjusted: Mapping[str, tuple[Reward, ...]],
    advantages: Mapping[str, float],
) -> Group:
    """Return the group that a finalizer sees after these drops and changes."""
    members = _adjusted(group, adjusted)
    return structs.replace(
        group,
        members=tuple(member for member in members if member.sample_id not in dropped),
        dropped=tuple(
            structs.replace(member, end=f"filtered/{dropped[member.sample_id]}")
            for member in members
            if member.sample_id in dropped
        ),
        advantages={name: value for name, value in advantages.items() if name not in dropped},
    )


def _context(group: Group, adjusted: Mapping[str, tuple[Reward, ...]]) -> GroupContext:
    """Return all scored members, as the estimator of the trainer gets them: a dropped one counts in the baseline."""
    members = _adjusted(group, adjusted)
    labels = short_labels(group.task.labels)
    return GroupContext(
        group=group.group,
        task=group.task.task_id,
        members=members,
        labels=labels,
        propensity=group.propensity,
    )


def _adjusted(group: Group, adjusted: Mapping[str, tuple[Reward, ...]]) -> tuple[MemberOutcome, ...]:
    return tuple(
        structs.replace(member, rewards=tuple(adjusted[member.sample_id])) if member.sample_id in adjusted else member
        for member in group.members
    )
