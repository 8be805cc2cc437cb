"""GRPO on rewards that favor unlikely correct samples (Rewarding the Unlikely, 2025-06, arXiv:2506.02355; code:
AndreHe02/rewarding-unlikely-release).

    rank_i = 0 for the sample of the group with the lowest mean behavior log-prob, G - 1 for the highest
    R_i <- R_i (1 - beta rank_i / G),   then the advantages of `grpo`

Of two correct samples, the less likely one gets the larger reward; wrong samples keep 0. Log-probs are those of the
sampling policy, per token, at the sampling temperature. The paper combines it with two epochs per batch, as the recipe
does.

All members of a group are ranked, trained or not. Their log-probs are those of their summaries, over all tokens that
the policy sampled. Without a summary, which workers of older versions do not report, a leased sample has the mean over
its trained tokens, and another member is not ranked: G is the number of the others, and it gets the mean factor, so
that it does not shift the baseline.

Deviations: equal log-probs share the mean of their ranks, so that copies of one answer get one reward. A negative R is
not changed. Where a member of the group has no summary, `of_group` returns the advantages of `grpo`, and `UNDECIDED` if
all members have the same positive reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import Settings, Share
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import UNDECIDED, Estimate
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class UnlikelinessOptions(GrpoOptions):
    """Settings of the estimator `unlikeliness`: those of `grpo`, and the reward of the unlikely."""

    beta: Share = 0.25
    """Share of its reward that the likeliest sample of a large group loses."""


class Unlikeliness(Grpo):
    """Rank the samples of a group by their likelihood, and scale their rewards."""

    Options: ClassVar[type[Settings]] = UnlikelinessOptions
    needs_behavior = True

    def __call__(self, batch: UpdateBatch) -> Estimate:
        means = batch.sums(batch["behavior"]) / batch.lengths
        leased = {s.sample.sample_id: float(means[number]) for number, s in enumerate(batch.samples)}
        scored = [self._scored(group, leased) for group in batch.groups]
        return self.spread(batch, self.of_sums(scored, self.given(batch)))

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage, as in `grpo`; from summaries alone (see the module)."""
        members, sums = self.reward_sums(group)
        if not all(m.summary.num_tokens for m in members):
            agree = len(sums) > 0 and sums[0] > 0 and bool((sums == sums[0]).all())
            return {m.sample_id: UNDECIDED for m in members} if agree else super().of_group(group)
        return self.of_rewards(*self._scored(group, {}))

    def _scored(
        self, group: GroupContext, leased: Mapping[str, float]
    ) -> tuple[list[MemberOutcome], NDArray[np.float64]]:
        """Return the members with usable rewards, and their scaled rewards. `leased`: sample id -> mean log-prob."""
        members, sums = self.reward_sums(group)
        logprobs = [m.summary.mean_logprob if m.summary.num_tokens else leased.get(m.sample_id) for m in members]
        return members, np.where(sums > 0, sums * unlikeliness_factors(logprobs, self.options.beta), sums)


def unlikeliness_factors(logprobs: Sequence[float | None], beta: float) -> NDArray[np.float64]:
    """Return the factors [n] of rewards, given the mean log-probs of the members of a group; None for a member that is
    not ranked."""
    at = [i for i, value in enumerate(logprobs) if value is not None]
    ranked = np.array([value for value in logprobs if value is not None], dtype=np.float64)
    num = len(at)
    factors = np.full(len(logprobs), 1.0 - beta * (num - 1) / (2 * num) if num else 1.0)
    below = (ranked[None, :] < ranked[:, None]).sum(axis=1)
    equal = (ranked[None, :] == ranked[:, None]).sum(axis=1)
    factors[at] = 1.0 - beta * (below + (equal - 1) / 2) / max(1, num)
    return factors
