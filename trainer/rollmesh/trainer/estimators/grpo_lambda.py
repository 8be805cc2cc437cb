"""GRPO with a reward for brevity where the policy is good already (GRPO-lambda, "Stable Reinforcement Learning for
Efficient Reasoning", 2025-05, arXiv:2505.18086; no code of the authors).

The groups of the batch are ranked by accuracy, the share of their correct members. The first `share` of them favor
brevity, the others only accuracy:

    r_i = 1 - alpha sigmoid((L_i - mean L) / std L)   if i is correct, else 0      in the first groups
    r_i = 1                                           if i is correct, else 0      in the others
    then the advantages of `grpo`

L_i is the number of tokens that the policy sampled, and mean and deviation are over the correct members of the group.
So a correct member always has more reward than a wrong one, and a group that fails often never pays for length. Another
GRPO-lambda (arXiv:2510.00194, eligibility traces) is not this method.

The formula and the share of 0.2 are the paper's, as a public reproduction quotes them. alpha is 0.6 there; that of the
paper is not established. The reproduction also rewards wrong answers in the first groups; the paper and this file do
not. Deviations: a member is correct if its weighted reward sum exceeds `threshold`. Accuracy, mean and deviation count
episodes. Groups of equal accuracy are ranked in the order of the batch, and at least one group is in the first share.
The sigmoid is 1 / 2 where all lengths agree, and for a correct member whose length is unknown. `of_group` does not know
the rank: it returns `UNDECIDED` for a group whose members are all correct, because their lengths may tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rollmesh.shared.config.settings import Settings, Share
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import UNDECIDED, Estimate, deviation, episode_weights
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class GrpoLambdaOptions(GrpoOptions):
    """Settings of the estimator `grpo_lambda`: those of `grpo`, and the reward for brevity."""

    share: Share = 0.2
    """Share of the groups, those with the highest accuracy, that favor brevity (lambda). At least one does, unless the
    share is 0."""
    alpha: Annotated[float, Meta(gt=0, lt=1)] = 0.6
    """Reward that a very long correct answer loses."""
    threshold: float = 0.5
    """A member is correct if its weighted reward sum is larger."""


class GrpoLambda(Grpo):
    """Reward brevity in the groups of the batch with the highest accuracy."""

    Options: ClassVar[type[Settings]] = GrpoLambdaOptions

    def __call__(self, batch: UpdateBatch) -> Estimate:
        leased = dict(zip((s.sample.sample_id for s in batch.samples), batch.lengths.tolist(), strict=True))
        scored = [self.reward_sums(group) for group in batch.groups]
        scored = [(members, self._correct(sums)) for members, sums in scored if members]
        accuracies = [float(episode_weights(members) @ correct) for members, correct in scored]
        first = first_groups(accuracies, self.options.share)
        for number in first:
            members, correct = scored[number]
            scored[number] = members, correct * brevity(members, correct, leased, self.options.alpha)
        found = self.spread(batch, self.of_sums(scored, self.given(batch)))
        metrics = {
            "brief_groups": float(len(first)),
            "brief_accuracy_min": min((accuracies[n] for n in first), default=0.0),
            "accuracy_mean": float(np.mean(accuracies)) if accuracies else 0.0,
        }
        return replace(found, metrics={**found.metrics, **metrics})

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage of the accuracy alone; `UNDECIDED` if several members are all correct."""
        members, sums = self.reward_sums(group)
        correct = self._correct(sums)
        if len(members) > 1 and self.options.share and correct.all():
            return {m.sample_id: UNDECIDED for m in members}
        return self.of_rewards(members, correct)

    def _correct(self, sums: NDArray[np.float64]) -> NDArray[np.float64]:
        threshold: float = self.options.threshold
        return (sums > threshold).astype(np.float64)


def first_groups(accuracies: Sequence[float], share: float) -> list[int]:
    """Return the numbers of the groups with the highest accuracies, in the order of their rank."""
    num = ceil(share * len(accuracies) - 1e-9)
    return sorted(range(len(accuracies)), key=lambda n: -accuracies[n])[:num]


def brevity(
    members: Sequence[MemberOutcome], correct: NDArray[np.float64], leased: Mapping[str, int], alpha: float
) -> NDArray[np.float64]:
    """Return [n]: the reward of each member of a group if it is correct. `leased`: sample id -> trained tokens, for
    members without a summary."""
    lengths = np.array([m.summary.num_tokens or leased.get(m.sample_id, 0) for m in members], dtype=np.float64)
    counted: list[int] = np.flatnonzero((correct > 0) & (lengths > 0)).tolist()
    scores = np.zeros(len(members))
    if counted:
        weights, found = episode_weights([members[i] for i in counted]), lengths[counted]
        std = deviation(found, weights)
        scores[counted] = (found - weights @ found) / std if std else 0.0
    rewards: NDArray[np.float64] = 1.0 - alpha / (1.0 + np.exp(-scores))
    return rewards
