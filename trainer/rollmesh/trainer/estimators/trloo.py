"""Leave-one-out advantage per turn (TRLOO of Dr. Kernel, 2026-02, arXiv:2602.05885; code: hkust-nlp/KernelGYM).

    G_it = sum over k >= t of discount ^ (k - t) r_ik         return of member i from turn t on
    A_it = G_it - mean of G_jt over the other members j that reached turn t

r_ik is the weighted sum of the rewards of turn k; rewards of the whole sample are rewards of its last turn. If no other
member reached the turn, the baseline is 0. Why: a baseline that contains the member itself, as in GRPO, shrinks the
gradient by (n - 1) / n, and n differs from turn to turn, which biases long episodes against short ones. Rewards before
a turn have no effect on its advantage.

The other members are those of other episodes: a mean over the samples of each episode, then over episodes. For one
sample per episode, which the paper has, this is its formula. With `baseline: policy`, a given solution has an
advantage, but its returns are in no baseline, as in `grpo`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from rollmesh.shared.config.settings import Settings, Share
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import Estimate, GroupSize
from rollmesh.trainer.estimators.grpo import given_ids
from rollmesh.trainer.estimators.turns import PerTurn, TurnEstimator, scored_members, spread_turns

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.batch import UpdateBatch


class TrlooOptions(Settings):
    """Settings of the estimator `trloo`."""

    discount: Share = 1.0
    """Factor of a reward per turn that it is later (gamma)."""
    baseline: Literal["all", "policy"] = "all"
    """Members in the baseline: `all`, or those that the `policy` sampled, without given solutions. Finalizers count
    all."""


class Trloo(TurnEstimator):
    """Center returns by those of the other episodes at the same turn."""

    Options: ClassVar[type[Settings]] = TrlooOptions
    group_size = GroupSize(least=2)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        given = given_ids(batch) if self.options.baseline == "policy" else frozenset()
        found: dict[str, PerTurn] = {}
        for group in batch.groups:
            found |= against_others(scored_members(group, self.weights, self.options.discount), given)
        return spread_turns(batch, found)

    def of_turns(self, group: GroupContext) -> dict[str, PerTurn]:
        """Return sample id -> advantage per turn, with all members in the baseline."""
        return against_others(scored_members(group, self.weights, self.options.discount))


def against_others(scored: Sequence[tuple[MemberOutcome, PerTurn]], given: Collection[str] = ()) -> dict[str, PerTurn]:
    """Return sample id -> the returns per turn minus the mean of the other episodes at the same turn, given the returns
    of the members of a group. Those whose ids are `given` are in no baseline."""
    reached: list[dict[str, list[float]]] = []
    for member, returns in scored:
        for turn, value in enumerate(returns.tolist()):
            if turn == len(reached):
                reached.append({})
            if member.sample_id not in given:
                reached[turn].setdefault(member.episode or member.sample_id, []).append(value)
    found = {}
    for member, returns in scored:
        advantages = returns.copy()
        for turn, value in enumerate(returns.tolist()):
            episode = member.episode or member.sample_id
            others = [np.mean(values) for name, values in reached[turn].items() if name != episode]
            if others:
                advantages[turn] = -np.mean(np.array(others) - value)  # equal returns become exactly 0
        found[member.sample_id] = advantages
    return found
