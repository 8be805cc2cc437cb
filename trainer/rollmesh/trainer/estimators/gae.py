"""Generalized advantage estimation with a critic, as in PPO and VAPO. The loss term `value` trains the critic.

Schulman et al. 2015 (arXiv:1506.02438), in PPO (arXiv:1707.06347). With V the value before a token under the policy at
the start of the update, r the reward of the token, and sums over the trained tokens of a sample:

    delta_t  = r_t + discount V_(t + 1) - V_t                        V = 0 after the last token
    A_t      = sum over k >= t of (discount lambda_policy)^(k - t) delta_k,   whitened over the tokens of the batch
    return_t = V_t + sum over k >= t of (discount lambda_critic)^(k - t) delta_k                  the target of the critic

The reward of the sample is that of its last token, and rewards of turns are those of their last tokens. `kl` subtracts
kl (log prox - log ref) from the reward of every token, as in InstructGPT (arXiv:2203.02155). Two lambdas are the
decoupled GAE of VC-PPO (arXiv:2503.01491). With `length_alpha`, lambda_policy = 1 - 1 / (length_alpha n) for a sample
of n tokens, the length-adaptive GAE of VAPO (arXiv:2504.05118). It is 0 for n < 1 / length_alpha. In the first
`pretraining_updates` updates A is 0, so that the critic is trained and the policy is not.

Defaults are those of verl (core_algos.py, `compute_gae_advantage_return`): both lambdas 1, no penalty. The
PPOTrainer of earlier versions of TRL, which 1.16 does not have, has lambda 0.95 and kl 0.05. In the columns, `returns`
is the target, and `positive` is 1 at the tokens of samples whose reward sum is above `positive_above`, for the term
`positive_lm`. Needs no group. Deviations: population deviation in the whitening, in which an episode with several
samples counts once; verl repeats the value of a token that was not sampled, which here has no value.
"""  # noqa: E501, W505

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rollmesh.shared.config.settings import NonNegativeFloat, NonNegativeInt, Settings, Share
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import Estimate, GroupEstimator
from rollmesh.trainer.estimators.returns import (
    PerToken,
    discounted_sums,
    divergence_of,
    shifted,
    token_rewards,
    whitened,
)
from rollmesh.trainer.estimators.turns import undecided_turns

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.batch import UpdateBatch


class GaeOptions(Settings):
    """Settings of the estimator `gae`."""

    discount: Share = 1.0
    """Factor of the value of the next token (gamma)."""
    lambda_policy: Share = 1.0
    """Smoothing of the advantages. 1 takes the rewards, 0 the critic's value of the next token."""
    lambda_critic: Share = 1.0
    """Smoothing of the targets of the critic. 1 is the sum of the rewards, without bias."""
    length_alpha: NonNegativeFloat = 0.0
    """Replaces lambda_policy by 1 - 1 / (length_alpha x trained tokens of the sample); 0 does not. VAPO: 0.05."""
    kl: NonNegativeFloat = 0.0
    """Reward that a token loses per nat of divergence from the reference. 0 needs no reference."""
    whiten: bool = True
    """Center the advantages of the batch, and divide them by their standard deviation."""
    pretraining_updates: NonNegativeInt = 0
    """Updates at the begin of the run in which only the critic is trained. Loss terms that do not read the advantages,
    such as `kl` and `entropy`, train the policy anyway."""
    positive_above: float = 0.5
    """A sample is a positive example if its weighted reward sum is larger."""


class Gae(GroupEstimator):
    """See the module."""

    Options: ClassVar[type[Settings]] = GaeOptions
    needs_behavior = False
    columns = ("returns", "positive")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("values", "proximal", "reference") if self.options.kl else ("values",)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: GaeOptions = self.options
        rewards, dropped = token_rewards(batch, self.weights)
        metrics = {}
        if options.kl:
            divergence = divergence_of(batch)
            metrics["kl_mean"] = float(divergence.mean())
            rewards = rewards - options.kl * divergence
        values = batch["values"].astype(np.float64)
        deltas = rewards + options.discount * shifted(values, batch.lengths) - values
        advantages = discounted_sums(deltas, batch.lengths, options.discount * self._lambdas(batch))
        whole = np.full(len(batch.samples), options.discount * options.lambda_critic)
        returns = values + discounted_sums(deltas, batch.lengths, whole)
        policy_trains = batch.update > options.pretraining_updates
        metrics |= {
            "value_mean": float(values.mean()),
            "explained_variance": explained_variance(values, returns),
            "advantage_abs": float(np.abs(advantages).mean()),
            "pretraining": float(not policy_trains),
        }
        if options.whiten:
            advantages = whitened(advantages, batch, dropped)
        positive = (batch["reward"] > options.positive_above) & policy_trains
        return Estimate(
            advantages=(advantages * policy_trains).astype(np.float32),
            dropped=dropped,
            metrics=metrics,
            columns={"returns": returns.astype(np.float32), "positive": positive.astype(np.float32)},
        )

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return `UNDECIDED` for each member with usable rewards, because the critic decides."""
        return undecided_turns(group)

    def _lambdas(self, batch: UpdateBatch) -> PerToken:
        """Return lambda_policy of each sample [S]."""
        options: GaeOptions = self.options
        if not options.length_alpha:
            return np.full(len(batch.samples), options.lambda_policy)
        adapted: PerToken = np.maximum(1.0 - 1.0 / (options.length_alpha * batch.lengths), 0.0)
        return adapted


def explained_variance(values: PerToken, returns: PerToken) -> float:
    """Return 1 - var(returns - values) / var(returns), which is 1 for a perfect critic; 0 if all returns are equal."""
    variance = float(returns.var())
    return 1.0 - float((returns - values).var()) / variance if variance > 0 else 0.0
