"""REINFORCE++: discounted returns with the divergence in the reward, whitened over the whole batch (Hu et al. 2025,
arXiv:2501.03262; code: OpenRLHF).

    r_t = [reward at the last token] - kl (log prox - log ref)_t
    G_t = sum over k >= t of discount^(k - t) r_k
    A_t = (G_t - mean G) / std G                     over all trained tokens of the batch

There is neither a critic nor a group: the whole batch is the baseline, which is less biased than that of a small group.
`baseline: group` is REINFORCE++-baseline, for groups: the mean reward of the group is subtracted before, without a
division by its deviation, and the deviation of the batch scales. It has no KL term in the reward but a loss term `kl`
of kind k2. verl has both (`reinforce_plus_plus`, `reinforce_plus_plus_baseline`), OpenRLHF as `reinforce` and
`reinforce_baseline`. Rewards of turns are those of their last tokens.

Deviations: population deviation in the whitening, in which an episode with several samples counts once. OpenRLHF also
limits rewards to +-10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, Settings, Share
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import Estimate, GroupEstimator, GroupSize, centered, episode_weights
from rollmesh.trainer.estimators.returns import PerToken, discounted_sums, divergence_of, token_rewards, whitened
from rollmesh.trainer.estimators.turns import scored_members, undecided_turns

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class ReinforcePlusPlusOptions(Settings):
    """Settings of the estimator `reinforce_plus_plus`."""

    discount: Share = 1.0
    """Factor of a reward per token that it is later (gamma)."""
    kl: NonNegativeFloat = 0.001
    """Reward that a token loses per nat of divergence from the reference. 0 needs no reference."""
    baseline: Literal["none", "group"] = "none"
    """`group` subtracts the mean reward of the group from the reward of each sample."""


class ReinforcePlusPlus(GroupEstimator):
    """See the module."""

    Options: ClassVar[type[Settings]] = ReinforcePlusPlusOptions
    needs_behavior = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("proximal", "reference") if self.options.kl else ()

    @property
    def group_size(self) -> GroupSize:
        """A group of one episode has no mean to compare with."""
        return GroupSize(least=2 if self.options.baseline == "group" else 1)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: ReinforcePlusPlusOptions = self.options
        rewards, dropped = token_rewards(batch, self.weights)
        metrics = {}
        if options.baseline == "group":
            rewards[np.cumsum(batch.lengths) - 1] -= self._baselines(batch)
        if options.kl:
            divergence = divergence_of(batch)
            metrics["kl_mean"] = float(divergence.mean())
            rewards = rewards - options.kl * divergence
        returns = discounted_sums(rewards, batch.lengths, np.full(len(batch.samples), options.discount))
        advantages = whitened(returns, batch, dropped).astype(np.float32)
        return Estimate(advantages=advantages, dropped=dropped, metrics=metrics)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return `UNDECIDED` for each member with usable rewards, because the batch decides; with the baseline `group`
        the reward minus the mean of the group."""
        if self.options.baseline == "none":
            return undecided_turns(group)
        members, sums = self.reward_sums(group)
        values = centered(sums, episode_weights(members), None)
        return {m.sample_id: a for m, a in zip(members, values.tolist(), strict=True)}

    def reward_sums(self, group: GroupContext) -> tuple[list[MemberOutcome], NDArray[np.float64]]:
        """Return the members with usable rewards, and the sum of all rewards of each, with those of its turns."""
        scored = scored_members(group, self.weights, 1.0)
        return [member for member, _ in scored], np.array([returns[0] for _, returns in scored], dtype=np.float64)

    def _baselines(self, batch: UpdateBatch) -> PerToken:
        """Return [S] the mean reward of the group of each sample."""
        means = {}
        for group in batch.groups:
            members, sums = self.reward_sums(group)
            means[group.group] = float(episode_weights(members) @ sums) if members else 0.0
        return np.array([means[sample.group] for sample in batch.samples])
