"""Contributions of turns as their rewards (Stepwise Progress Attribution, 2025, arXiv:2505.20732; code:
WangHanLinHenry/SPA-RL-Agent), for the loss term `progress`, which trains the head that predicts them.

    r_t = c_t + 0.5 [the action of turn t was executed]        c_t: contribution of the turn, from the head at the start of the update
    G_t = sum over k >= t of discount^(k-t) r_k
    A_t = G_t - mean of G_t over the other episodes of the group that reached turn t

The head is trained so that the sum of the contributions of a sample is its reward. In the first `warmup_updates`
updates A is 0, so that only the head is trained. An action was not executed if the turn has a reward of the name
`executed` that is <= 0, such as that of the scorer `turn_success` for a failed call. A turn without such a reward, as
the last one, counts as executed, as in the code. Rewards of turns are not used otherwise.

Deviations: the paper trains a separate model as the estimator, before the policy and not after, and takes PPO with a
value head and GAE, in place of which the other episodes are the baseline here. Of a member that is not leased the head
has no states; each of its turns gets an equal share of its reward. The published script has two lines that are not of
the paper and not done here: it replaces the contributions by the outcome minus that of the other trajectories, and its
trainer multiplies the reward of a step by the number of steps after it.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rollmesh.shared.config.settings import NonNegativeFloat, NonNegativeInt, Settings, Share
from rollmesh.shared.domain.trajectory import WHOLE_SAMPLE, GroupContext, MemberOutcome, Outcome
from rollmesh.trainer.estimators.base import (
    UNDECIDED,
    Estimate,
    GroupEstimator,
    GroupSize,
    filled,
    usable_rewards,
    weight_of,
)
from rollmesh.trainer.estimators.trloo import against_others
from rollmesh.trainer.estimators.turns import PerTurn, spread_turns

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch

VALUES = "progress_values"


class SpaOptions(Settings):
    """Settings of the estimator `spa`."""

    warmup_updates: NonNegativeInt = 20
    """Updates in which all advantages are 0 and only the head is trained."""
    discount: Share = 1.0
    """Factor of a reward per turn that it is later (gamma)."""
    executed: str = "executed"
    """Name of the reward of a turn that is <= 0 if its action was not executed."""
    executed_bonus: NonNegativeFloat = 0.5
    """Reward of a turn whose action was executed."""


class Spa(GroupEstimator):
    """See the module."""

    Options: ClassVar[type[Settings]] = SpaOptions
    needs = (VALUES,)
    needs_behavior = False
    group_size = GroupSize(least=2)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        contributions = self._contributions(batch)
        found: dict[str, PerTurn] = {}
        errors, executed = [0.0], [1.0]
        for group in batch.groups:
            scored = []
            for member in self._scored(group):
                reward = self._outcome(member)
                own = contributions.get((group.group, member.sample_id))
                if own is None:
                    num = max(1, len(member.summary.turns))
                    own = np.full(num, reward / num)
                else:
                    errors.append(abs(float(own.sum()) - reward))
                done = executed_turns(member, self.options.executed, len(own))
                executed += done.tolist()
                scored.append((member, self._returns(own + self.options.executed_bonus * done)))
            found |= against_others(scored)
        warm = batch.update > self.options.warmup_updates
        estimate = spread_turns(batch, {name: values * warm for name, values in found.items()})
        metrics = {
            "contribution_error": float(np.mean(errors[1:] or [0.0])),
            "executed_share": float(np.mean(executed[1:] or [1.0])),
        }
        return Estimate(advantages=estimate.advantages, dropped=estimate.dropped, metrics=metrics)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return `UNDECIDED` for each member with usable rewards, because the head decides."""
        return dict.fromkeys((member.sample_id for member in self._scored(group)), UNDECIDED)

    def _scored(self, group: GroupContext) -> list[MemberOutcome]:
        return [
            member
            for member in filled(group).members
            if usable_rewards(member) is not None
            and not any(reward.outcome is Outcome.INFRA_FAILURE for reward in member.rewards)
        ]

    def _outcome(self, member: MemberOutcome) -> float:
        return sum(weight_of(name, self.weights) * value for name, value in (usable_rewards(member) or {}).items())

    def _returns(self, rewards: PerTurn) -> PerTurn:
        returns = rewards.copy()
        for turn in range(len(returns) - 2, -1, -1):
            returns[turn] += self.options.discount * returns[turn + 1]
        return returns

    @staticmethod
    def _contributions(batch: UpdateBatch) -> Mapping[tuple[str, str], PerTurn]:
        """Return (group, sample id) -> the contribution of each turn of the samples; 0 for a turn without trained
        tokens."""
        found: dict[tuple[str, str], PerTurn] = {}
        ends = np.cumsum(batch.lengths)[:-1]
        parts = zip(np.split(batch["turn"], ends), np.split(batch[VALUES], ends), strict=True)
        for sample, member, (turns, values) in zip(batch.samples, batch.members, parts, strict=True):
            own = np.zeros(max(len(member.summary.turns), int(turns.max(initial=0)) + 1))
            own[turns] = values
            found[sample.group, sample.sample.sample_id] = own
        return found


def executed_turns(member: MemberOutcome, name: str, num: int) -> PerTurn:
    """Return [num]: 0 for a turn with a reward of this name that is <= 0, and 1 for the others."""
    done = np.ones(num)
    for reward in member.rewards:
        if reward.name == name and reward.segment != WHOLE_SAMPLE and reward.outcome is Outcome.OK:
            turn = member.summary.turn_of(reward.segment)
            if turn is not None and turn < num and reward.value <= 0:
                done[turn] = 0.0
    return done
