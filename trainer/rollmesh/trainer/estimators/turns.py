"""Estimators whose advantage depends on the turn: returns of a member per turn, and advantages per turn as advantages
per token.

Turns are those of `MemberOutcome.summary`, so that members which are never leased count too. A member without a
summary, which a worker of an older version reported, counts as one turn with all of its rewards. Turns beyond those of
the summary count as its last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.domain.trajectory import WHOLE_SAMPLE, GroupContext, MemberOutcome, Outcome
from rollmesh.trainer.estimators.base import (
    UNDECIDED,
    UNSCORED,
    Estimate,
    GroupEstimator,
    filled,
    is_scored,
    turn_rewards,
    weight_of,
)

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.batch import UpdateBatch

PerTurn = NDArray[np.float64]
"""[T] one value per turn."""


class TurnEstimator(GroupEstimator):
    """Base of turn-level estimators that are functions of one group. A subclass defines `of_turns`."""

    needs_behavior = False

    def __call__(self, batch: UpdateBatch) -> Estimate:
        found: dict[str, PerTurn] = {}
        for group in batch.groups:
            found |= self.of_turns(group)
        return spread_turns(batch, found)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> the advantage of largest absolute value among its turns. It is 0 if no turn has a
        gradient."""
        return {name: float(values[np.abs(values).argmax()]) for name, values in self.of_turns(group).items()}

    def of_turns(self, group: GroupContext) -> dict[str, PerTurn]:
        """Return sample id -> advantage per turn, for the members that have usable rewards."""
        raise NotImplementedError


def turn_returns(member: MemberOutcome, weights: Mapping[str, float], discount: float) -> PerTurn | None:
    """Return [T]: the discounted sum of the rewards of each turn and the turns after it.

    Rewards of the whole sample count in the last turn. The result is None if a reward of the sample or of a turn is an
    infrastructure failure or not finite, or if nothing was scored.
    """
    scored = [r for r in member.rewards if r.outcome is Outcome.OK]
    if not is_scored(member):
        return None
    if member.summary.turns:
        returns = np.array(turn_rewards(member, weights), dtype=np.float64)
        scored = [r for r in scored if r.segment == WHOLE_SAMPLE]
    else:
        returns = np.zeros(1)
    returns[-1] += sum(weight_of(r.name, weights) * r.value for r in scored)
    for turn in range(len(returns) - 2, -1, -1):
        returns[turn] += discount * returns[turn + 1]
    return returns


def scored_members(
    group: GroupContext, weights: Mapping[str, float], discount: float
) -> list[tuple[MemberOutcome, PerTurn]]:
    """Return the members with usable rewards and their returns per turn. Rewards of the whole sample that a member does
    not have are `filled`."""
    found = [(member, turn_returns(member, weights, discount)) for member in filled(group, turns_suffice=True).members]
    return [(member, returns) for member, returns in found if returns is not None]


def filled_members(batch: UpdateBatch) -> tuple[MemberOutcome, ...]:
    """Return the samples of a batch as members of their groups, [S], whose rewards are `filled`."""
    return replace(batch, groups=tuple(filled(group, turns_suffice=True) for group in batch.groups)).members


def undecided_turns(group: GroupContext) -> dict[str, float]:
    """Return `UNDECIDED` for each member that `scored_members` returns: the result of `of_group` of an estimator that
    reads rewards of turns and needs the whole batch."""
    return {member.sample_id: UNDECIDED for member, _ in scored_members(group, {}, 0.0)}


def spread_turns(batch: UpdateBatch, values: Mapping[str, PerTurn]) -> Estimate:
    """Give every token the value of its turn. `values`: sample id -> advantage per turn. A sample without them is
    dropped."""
    advantages = np.zeros(int(batch.lengths.sum()), np.float32)
    dropped: dict[int, str] = {}
    turn, end = batch["turn"], 0
    for number, (sample, length) in enumerate(zip(batch.samples, batch.lengths.tolist(), strict=True)):
        start, end = end, end + length
        of_sample = values.get(sample.sample.sample_id)
        if of_sample is None:
            dropped[number] = UNSCORED
        else:
            advantages[start:end] = of_sample[np.minimum(turn[start:end], len(of_sample) - 1)]
    return Estimate(advantages=advantages, dropped=dropped)
