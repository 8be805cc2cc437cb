"""The log-ratio of the policy to the reference as a dense reward per token (From r to Q*, Rafailov et al. 2024,
arXiv:2404.12358; no public code).

    r_t = beta (log prox - log ref)(token t),     A_t = advantage of `grpo` + weight r_t

Direct preference optimization (arXiv:2305.18290) with the parameter beta fits a policy to an optimal one of the token
problem with the reward R of the last token and a penalty beta KL(pi || ref). For the optimal policy and its values V

    r_t = R_t + V(s_t+1) - V(s_t),     sum over t of r_t = R - V(s_1)

because the next state follows from the token. So r_t is the advantage of the token, and needs no further sum or
baseline; the sum over a sample ranks samples of one prompt as their rewards do, and a search for it is a search for
value. For other policies it is an estimate. prox is the policy at the start of the update, and both log-probs are at
the sampling temperature, in nats. Where policy and reference agree, as in the first update of a run with
`reference: {kind: initial}`, all r_t are 0.

The column `implicit_reward` [M] is available to loss terms and update rules. Metrics: `implicit_reward_mean` per token,
`implicit_return_mean` per sample, and `order_agreement`, the share of the pairs of samples of a group with different
rewards whose sums have the order of the rewards; a pair of equal sums counts half. A selector gets
`implicit_return_mean` of each group with leased samples.

Deviations: the paper has no training rule for r_t. With a weight above 0, what the policy already prefers to the
reference gets likelier, so that a large weight can collapse the entropy; 0 only exports. The log-ratio is limited to
+-20 nats.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, Settings
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import UNDECIDED, Estimate
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.batch import UpdateBatch

COLUMN = "implicit_reward"


class ImplicitRewardOptions(GrpoOptions):
    """Settings of the estimator `implicit_reward`: those of `grpo`, and the dense reward."""

    beta: PositiveFloat = 0.1
    """Reward per nat of log-ratio: the beta of the preference optimization that trained the policy."""
    weight: NonNegativeFloat = 1.0
    """Factor of the dense reward in the advantage of its token. 0 only reports it."""


class ImplicitReward(Grpo):
    """Add the log-ratio of a token to the advantage of its sample."""

    Options: ClassVar[type[Settings]] = ImplicitRewardOptions
    needs = ("proximal", "reference")
    columns = (COLUMN,)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: ImplicitRewardOptions = self.options
        found = super().__call__(batch)
        log_ratio = batch["proximal"].astype(np.float64) - batch["reference"]
        dense = options.beta * np.clip(log_ratio, -20.0, 20.0)
        returns = batch.sums(dense)
        metrics = {
            **found.metrics,
            "implicit_reward_mean": float(dense.mean()),
            "implicit_return_mean": float(returns.mean()),
        }
        agreement = self._order_agreement(batch, returns)
        groups = np.array([sample.group for sample in batch.samples])
        return replace(
            found,
            advantages=(found.advantages + options.weight * dense).astype(np.float32),
            columns={COLUMN: dense.astype(np.float32)},
            metrics=metrics | ({} if agreement is None else {"order_agreement": agreement}),
            measures={
                str(name): {"implicit_return_mean": float(returns[groups == name].mean())} for name in np.unique(groups)
            },
        )

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage of `grpo`, or `UNDECIDED` if all members have the same reward and the dense
        rewards count."""
        members, sums = self.reward_sums(group)
        if self.options.weight and len(sums) and (sums == sums[0]).all():
            return {m.sample_id: UNDECIDED for m in members}
        return super().of_group(group)

    def _order_agreement(self, batch: UpdateBatch, returns: NDArray[np.float64]) -> float | None:
        """Return the share of pairs with different rewards that the returns [S] order alike; None without such a
        pair."""
        of_sample = {s.sample.sample_id: value for s, value in zip(batch.samples, returns.tolist(), strict=True)}
        agree, pairs = 0.0, 0
        for group in batch.groups:
            members, sums = self.reward_sums(group)
            leased = [n for n, m in enumerate(members) if m.sample_id in of_sample]
            dense = np.array([of_sample[members[n].sample_id] for n in leased])
            better = sums[leased][:, None] > sums[leased][None, :]
            difference = np.sign(dense[:, None] - dense[None, :])[better]
            agree, pairs = agree + float((1 + difference).sum()) / 2, pairs + int(better.sum())
        return agree / pairs if pairs else None
