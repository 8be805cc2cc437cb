"""GRPO with the divergence from the reference in the reward, instead of a penalty term in the loss.

    R_i <- R_i - coefficient * sum over the trained tokens of k(d),   d = log prox - log ref,   then the advantages of `grpo`

k is an estimate of KL(prox || ref), as in `losses/kl.py`: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. This is the form
of PPO for language models (Ouyang et al. 2022, arXiv:2203.02155), of REINFORCE++ (arXiv:2501.03262) and of verl's
`use_kl_in_reward`. For one token, k1 in the reward and k2 as a loss have the same expected gradient on data of pi
(arXiv:2510.01555). Over a sample, the reward also counts against a token the divergence of the tokens after it, so that
its gradient is that of the divergence of whole samples.

prox is the policy at the start of the update, and both are at the sampling temperature. Deviations: only leased samples
have log-probs, so a member that is not leased gets the mean penalty of those of its group, which does not shift the
baseline. `of_group` has no log-probs: it returns `UNDECIDED` where all members of a group have the same reward, because
their penalties differ. The coefficient is constant; `adaptive_kl` adapts it to a target. d is limited to +-20.
"""  # noqa: E501, W505

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import UNDECIDED, Estimate, adjusted_sums
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class KlRewardOptions(GrpoOptions):
    """Settings of the estimator `kl_reward`: those of `grpo`, and the penalty."""

    coefficient: PositiveFloat = 0.001
    """Reward that a sample loses per nat of divergence from the reference."""
    kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimate of the divergence of a token. Only k1 is unbiased and has the right policy gradient."""


class KlReward(Grpo):
    """Subtract the divergence from the reward."""

    Options: ClassVar[type[Settings]] = KlRewardOptions
    needs = ("proximal", "reference")

    def __call__(self, batch: UpdateBatch) -> Estimate:
        divergence, coefficient = self.divergence(batch), self.coefficient(batch)
        sums = batch.sums(divergence)
        scored = adjusted_sums(batch, self.weights, -coefficient * sums)
        found = self.spread(batch, self.of_sums(scored, self.given(batch)))
        metrics = {"kl_mean": float(divergence.mean()), "penalty_mean": float(coefficient * sums.mean())}
        return replace(found, metrics={**found.metrics, **metrics})

    def coefficient(self, batch: UpdateBatch) -> float:
        """Return the reward that a sample of this batch loses per nat."""
        return float(self.options.coefficient)

    def divergence(self, batch: UpdateBatch) -> NDArray[np.float64]:
        """Return [M] the estimate of the divergence of each token from the reference."""
        log_ratio = batch["proximal"].astype(np.float64) - batch["reference"]
        return divergence_estimate(np.clip(log_ratio, -20.0, 20.0), self.options.kind)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage of `grpo`, or `UNDECIDED` if all members have the same reward."""
        members, sums = self.reward_sums(group)
        if len(sums) > 1 and (sums == sums[0]).all():
            return {m.sample_id: UNDECIDED for m in members}
        return super().of_group(group)


def divergence_estimate(log_ratio: NDArray[np.float64], kind: Literal["k1", "k2", "k3"]) -> NDArray[np.float64]:
    """Return the estimate [m] of KL(pi || q) for log pi - log q [m]."""
    if kind == "k1":
        return log_ratio
    found: NDArray[np.float64] = np.square(log_ratio) / 2 if kind == "k2" else np.expm1(-log_ratio) + log_ratio
    return found
