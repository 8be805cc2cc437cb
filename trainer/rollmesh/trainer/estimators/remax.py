"""ReMax: the reward of a greedy sample of the same prompt is the baseline (2023-10, arXiv:2310.10505; code:
liziniu/ReMax).

    A_t = sum_{s >= t} r_s - R(greedy)       R: sum of all rewards of a sample

A greedy sample is one whose tokens were all drawn at temperature 0 (`SampleSummary.greedy`); `rollout.greedy_first`
makes the first episode of each group such a sample, which is scored and not trained. Rewards of turns count from their
turn on (reward-to-go); a reward of the whole sample counts for all tokens. Advantages have the unit of the rewards.
Why: the baseline needs no critic and no further samples, and it is the value that the policy reaches now. Deviations:
several greedy samples of a group count with their mean over episodes. A group without one has no baseline, and its
samples are dropped as NO_BASELINE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import (
    UNSCORED,
    Estimate,
    GroupEstimator,
    episode_weights,
    filled,
    turn_rewards,
    usable_rewards,
)

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch

NO_BASELINE = "NO_BASELINE"
"""Reason of a sample whose group has no scored greedy member."""


class Remax(GroupEstimator):
    """See the module."""

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> its return minus that of the greedy member: the advantage of its first token. Empty
        without a baseline."""
        group = self._filled(group)
        baseline = self._baseline(group)
        if baseline is None:
            return {}
        return {m.sample_id: self._return(m) - baseline for m in group.members if usable_rewards(m) is not None}

    def __call__(self, batch: UpdateBatch) -> Estimate:
        """Return the advantages of the batch."""
        batch = replace(batch, groups=tuple(map(self._filled, batch.groups)))
        baselines = {group.group: self._baseline(group) for group in batch.groups}
        to_go, dropped = [], {}
        for number, (member, group) in enumerate(zip(batch.members, batch.contexts, strict=True)):
            baseline, turns = baselines[group.group], turn_rewards(member, self.weights)
            if usable_rewards(member) is None:
                dropped[number] = UNSCORED
            elif baseline is None:
                dropped[number] = NO_BASELINE
            # Without turns, one value serves all tokens.
            rest = np.cumsum(turns[::-1])[::-1] if len(turns) else np.zeros(1)
            to_go.append(rest + self._of_sample(member) - (baseline or 0.0))
        num_without = sum(reason == NO_BASELINE for reason in dropped.values())
        return Estimate(
            advantages=batch.per_turn(to_go), dropped=dropped, metrics={"without_baseline": float(num_without)}
        )

    @staticmethod
    def _filled(group: GroupContext) -> GroupContext:
        """A reward that a member does not have gets the value of the greedy member."""
        return filled(group, [m.sample_id for m in group.members if m.summary.greedy])

    def _baseline(self, group: GroupContext) -> float | None:
        greedy = [m for m in group.members if m.summary.greedy and usable_rewards(m) is not None]
        return float(episode_weights(greedy) @ [self._return(m) for m in greedy]) if greedy else None

    def _return(self, member: MemberOutcome) -> float:
        return self._of_sample(member) + float(turn_rewards(member, self.weights).sum())

    def _of_sample(self, member: MemberOutcome) -> float:
        return sum(self.weight_of(name) * value for name, value in (usable_rewards(member) or {}).items())
