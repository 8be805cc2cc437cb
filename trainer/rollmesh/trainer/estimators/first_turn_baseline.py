"""Advantage of a second answer over the first answers of the group.

RLTF-SD (2026-02, arXiv:2602.02482):  A(y1_i) = R(y1_i) - mean_j R(y0_j),   A(y0_i) = 0

R is the weighted sum of the rewards of a turn. If all answers are right, A is 0. Samples with the role `feedback_role`
are critiques: they are in no mean and have advantage 0, so that only a term such as `imitation` trains them. A critique
with a failure of the infrastructure is dropped. The mean counts episodes. Turns after the second one are compared as
the second one.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import GroupSize, episode_weights, has_failure, turn_rewards, usable_rewards
from rollmesh.trainer.estimators.turns import PerTurn, TurnEstimator


class FirstTurnBaselineOptions(Settings):
    """Settings of the estimator `first_turn_baseline`."""

    feedback_role: NonEmptyStr = "critique"
    """Role of the samples that are critiques."""


class FirstTurnBaseline(TurnEstimator):
    """Subtract the mean reward of the first turns of the group from that of each later turn."""

    Options: ClassVar[type[Settings]] = FirstTurnBaselineOptions
    group_size = GroupSize(least=2)

    def of_turns(self, group: GroupContext) -> dict[str, PerTurn]:
        critiques = [m for m in group.members if m.summary.role == self.options.feedback_role]
        others = [m for m in group.members if m.summary.role != self.options.feedback_role]
        members = [m for m in others if usable_rewards(m) is not None and m.summary.turns]
        found = {member.sample_id: np.zeros(1) for member in critiques if not has_failure(member)}
        rewards = [turn_rewards(member, self.weights) for member in members]
        if members:
            baseline = episode_weights(members) @ np.array([of_member[0] for of_member in rewards])
            for member, of_member in zip(members, rewards, strict=True):
                found[member.sample_id] = np.concatenate([[0.0], of_member[1:] - baseline])
        return found
