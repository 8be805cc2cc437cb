"""Compare each sample with those of the same role: for episodes in which one policy plays several roles.

    A = (R - mean R) / (std R + epsilon)          over the samples of the same role in the scope of the role

R is the weighted sum of the rewards of a sample, and its role is what the agent gave with `env.sample(role=...)`. The
rewards of two roles have different means, such as those of the two sides of a game whose rewards sum to 0, so that a
common mean would praise one role for its task. Scopes:

    episode    the samples of the role in the same episode, such as several answers to a question of this episode
    group      those of the episodes of the group, in which every episode counts once
    batch      those of all groups of the update
    none       A = R

Source: Self-RedTeam (2025, arXiv:2506.07468; code: mickelliu/selfplay-redteaming), which normalizes the advantages of
attacker and defender apart over the batch, and SSP (2025, arXiv:2510.18821; code: Alibaba-Quark/SSP), whose solver is
compared within the answers to one question and whose proposer is not. Deviation from the former: samples count, and
not tokens. `ROLE_reward` among the metrics is the mean R of a role.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from msgspec.structs import replace as with_members
from numpy.typing import NDArray

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import (
    UNDECIDED,
    Estimate,
    GroupEstimator,
    GroupSize,
    centered,
    deviation_of_sums,
    episode_weights,
    spread,
)

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch

Scope = Literal["episode", "group", "batch", "none"]
Scored = tuple[list[MemberOutcome], NDArray[np.float64]]


class RolesOptions(Settings):
    """Settings of the estimator `roles`."""

    scope: Scope = "batch"
    """Samples with which one of the same role is compared, for roles that `scopes` does not name."""
    scopes: dict[str, Scope] = {}
    """Role -> scope."""
    std: bool = True
    """Whether to divide by the standard deviation. Not in the scope `none`."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


class Roles(GroupEstimator):
    """Center and scale reward sums within each role."""

    Options: ClassVar[type[Settings]] = RolesOptions
    needs_behavior = False

    @property
    def group_size(self) -> GroupSize:
        """A role with the scope `group` needs several episodes."""
        options: RolesOptions = self.options
        return GroupSize(least=2 if "group" in (options.scope, *options.scopes.values()) else 1)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        found: dict[str, float] = {}
        metrics: dict[str, float] = {}
        by_role: dict[str, list[Scored]] = {}
        for group in batch.groups:
            for role, scored in self._by_role(group).items():
                by_role.setdefault(role, []).append(scored)
        for role, groups in by_role.items():
            members = [member for some, _ in groups for member in some]
            sums = np.concatenate([values for _, values in groups])
            metrics[f"{role or 'no_role'}_reward"] = float(episode_weights(members) @ sums)
            parts = [(members, sums)] if self._scope(role) == "batch" else groups
            for part in parts:
                found |= self._compared(role, *part)
        estimate = spread(batch, found)
        return replace(estimate, metrics={**estimate.metrics, **metrics})

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage; `UNDECIDED` for a role that is compared over the batch."""
        found: dict[str, float] = {}
        for role, (members, sums) in self._by_role(group).items():
            if self._scope(role) == "batch":
                found |= {member.sample_id: UNDECIDED for member in members}
            else:
                found |= self._compared(role, members, sums)
        return found

    def _by_role(self, group: GroupContext) -> dict[str, Scored]:
        """Return role -> its members with usable rewards, and their reward sums. A reward that one role does not have
        is not filled in from another role."""
        roles = dict.fromkeys(member.summary.role for member in group.members)
        parts = {role: tuple(m for m in group.members if m.summary.role == role) for role in roles}
        scored = {role: self.reward_sums(with_members(group, members=some)) for role, some in parts.items()}
        return {role: found for role, found in scored.items() if found[0]}

    def _compared(self, role: str, members: Sequence[MemberOutcome], sums: NDArray[np.float64]) -> dict[str, float]:
        """Return the advantages of samples of one role; with the scope `episode` within each episode of them."""
        scope, options = self._scope(role), self.options
        values = np.array(sums, dtype=np.float64)
        if scope != "none":
            episodes = np.array([m.episode or m.sample_id for m in members])
            for episode in dict.fromkeys(episodes.tolist()) if scope == "episode" else ("",):
                at = np.flatnonzero(episodes == episode) if scope == "episode" else np.arange(len(members))
                of_role = [members[n] for n in at.tolist()]
                weights = episode_weights(of_role)
                scale = deviation_of_sums(of_role, values[at], weights, self.weights) if options.std else None
                values[at] = centered(values[at], weights, None) / (1.0 if scale is None else scale + options.epsilon)
        return {member.sample_id: value for member, value in zip(members, values.tolist(), strict=True)}

    def _scope(self, role: str) -> Scope:
        options: RolesOptions = self.options
        return options.scopes.get(role, options.scope)
