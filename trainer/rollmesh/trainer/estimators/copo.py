"""Advantage that blends the group with the batch by the consistency of the answers (COPO, 2025-08, arXiv:2508.04138;
code: hijih/copo-code).

    H        = - sum over distinct answers of p log2 p               entropy of the final answers of a group, in bits
    global   = z-score, over the groups of the batch, of mean R  (1 - l H),   l = (1 - 1 / G) / log2 G with `entropy_discount`, else 0
    local    = (R - mean_group R) / (std_group R + epsilon)          the advantage of `grpo`
    w        = sigmoid(sharpness (H - threshold)),   A = w local + (1 - w) global

Groups whose answers agree follow the batch: they get a positive advantage if they are right and other prompts are not,
and a negative one if they agree on an error. Groups with many answers follow their own rewards. So groups without
variance have a gradient, and the recipe keeps them. p counts episodes, each shared by its samples; G is their number. A
member in whose text no scorer found an answer has the answer "none", like the other such members. If no member of a
group has one, its consistency is unknown, and A is the local advantage.

Deviations: the paper blends two clipped losses, not two advantages. Both are the same but for tokens whose ratio is
outside the clip bounds while local and global advantage differ in sign. Standard deviations are those of the
population, and over all scored members, trained or not. Answers are compared as the scorer extracted them.
"""  # noqa: E501, W505

from __future__ import annotations

from collections import defaultdict
from math import exp, log2
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import (
    Estimate,
    GroupEstimator,
    GroupSize,
    centered,
    deviation_of_sums,
    episode_weights,
    spread,
    undecided,
)

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class CopoOptions(Settings):
    """Settings of the estimator `copo`."""

    sharpness: PositiveFloat = 20.0
    """Slope of the blend per bit of entropy (k)."""
    threshold: float = 0.5
    """Entropy, in bits, at which both advantages have equal weight (b)."""
    entropy_discount: bool = False
    """Reduce the global reward of a group with different answers."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviations."""


class Copo(GroupEstimator):
    """Blend the advantage within the group with the z-score of the group in the batch."""

    Options: ClassVar[type[Settings]] = CopoOptions
    needs_behavior = False
    group_size = GroupSize(least=2)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: CopoOptions = self.options
        scored = [found for group in batch.groups if len((found := self.reward_sums(group))[0])]
        entropies = [answer_entropy(members) for members, _ in scored]
        rewards = [float(episode_weights(members) @ sums) for members, sums in scored]
        if options.entropy_discount:
            rewards = [
                reward * (1 - entropy_factor(members) * (entropy or 0.0))
                for reward, entropy, (members, _) in zip(rewards, entropies, scored, strict=True)
            ]
        of_groups = centered(np.array(rewards), np.full(len(rewards), 1 / max(1, len(rewards))), options.epsilon)
        advantages: dict[str, float] = {}
        shares = []
        for (members, sums), entropy, of_group in zip(scored, entropies, of_groups.tolist(), strict=True):
            share = 1.0 if entropy is None else blend(entropy, options)
            weights = episode_weights(members)
            scale = deviation_of_sums(members, sums, weights, self.weights)
            local = centered(sums, weights, None) / (scale + options.epsilon)
            shares.append(share)
            for member, value in zip(members, local.tolist(), strict=True):
                advantages[member.sample_id] = share * value + (1 - share) * of_group
        known = [entropy for entropy in entropies if entropy is not None]
        metrics = {
            "answer_entropy_mean": float(np.mean(known)) if known else 0.0,
            "local_share_mean": float(np.mean(shares)) if shares else 1.0,
        }
        estimate = spread(batch, advantages)
        return Estimate(advantages=estimate.advantages, dropped=estimate.dropped, metrics=metrics)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return `UNDECIDED` for each member with usable rewards, because the batch decides."""
        return undecided(group)


def answer_entropy(members: list[MemberOutcome]) -> float | None:
    """Return the entropy of the answers of the members, in bits; None if none of them has an answer."""
    if not any(member.answer for member in members):
        return None
    shares: dict[str, float] = defaultdict(float)
    for member, weight in zip(members, episode_weights(members).tolist(), strict=True):
        shares[member.answer] += weight
    return max(0.0, -sum(share * log2(share) for share in shares.values()))


def entropy_factor(members: list[MemberOutcome]) -> float:
    """Return l, which makes the discount (1 - 1 / G) for G different answers; 0 for one episode."""
    num = len({member.episode or member.sample_id for member in members})
    return (1 - 1 / num) / log2(num) if num > 1 else 0.0


def blend(entropy: float, options: CopoOptions) -> float:
    """Return the weight of the local advantage."""
    return 1 / (1 + exp(-min(max(options.sharpness * (entropy - options.threshold), -500.0), 500.0)))
