"""GRPO on the samples that no other sample exceeds in every reward (Parrot, 2024-01, arXiv:2401.05675; no public code).

    a dominates b if each reward of a is at least that of b, and one is larger
    samples that are dominated by another one of their pool are not trained; then the advantages of `grpo`

The rest is the Pareto front: the best trade-offs between the rewards, found without a choice of weights. Weights still
decide the advantages within the front. The paper selects per batch of images, which are several of one prompt; a pool
is a group here, or with `pool: batch` the batch.

From the abstract and public summaries: the rest of the method, joint training of an image generator and of a network
that extends its prompts, and the guidance by the original prompt, does not apply to a language model. Deviations: the
advantages are centered over all members, where a policy gradient with the rewards is usual for images. A reward counts
if its weight is not 0, and a smaller value is better if the weight is negative. A sample is compared only with samples
that have the same rewards. Members that are not leased dominate others too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import Settings
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import Estimate, usable_rewards
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch

DOMINATED = "DOMINATED"
"""Reason of a sample that is not trained because another one is at least as good in every reward, and better in one."""


class ParrotOptions(GrpoOptions):
    """Settings of the estimator `parrot`: those of `grpo`, and the pool."""

    pool: Literal["group", "batch"] = "group"
    """Samples that are compared with each other."""


class Parrot(Grpo):
    """Train the Pareto front of the rewards."""

    Options: ClassVar[type[Settings]] = ParrotOptions

    def __call__(self, batch: UpdateBatch) -> Estimate:
        found = super().__call__(batch)
        pools = [group.members for group in batch.groups]
        if self.options.pool == "batch":
            pools = [tuple(m for members in pools for m in members)]
        dominated = {name for members in pools for name in self._dominated(members)}
        at = [n for n, sample in enumerate(batch.samples) if sample.sample.sample_id in dominated]
        dropped = {**dict.fromkeys(at, DOMINATED), **found.dropped}
        candidates = len(batch.samples) - len(found.dropped)
        metrics = {"front_share": (len(batch.samples) - len(dropped)) / max(1, candidates)}
        return replace(found, dropped=dropped, metrics={**found.metrics, **metrics})

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage; 0 for a member that another one of the group dominates."""
        dominated = self._dominated(group.members)
        return {name: 0.0 if name in dominated else a for name, a in super().of_group(group).items()}

    def _dominated(self, members: Sequence[MemberOutcome]) -> set[str]:
        """Return the sample ids of the members that another member dominates."""
        alike: dict[tuple[str, ...], list[tuple[str, list[float]]]] = {}
        for member in members:
            rewards = usable_rewards(member) or {}
            names = tuple(sorted(name for name in rewards if self.weight_of(name)))
            better = [float(np.sign(self.weight_of(name))) * rewards[name] for name in names]
            alike.setdefault(names, []).append((member.sample_id, better))
        found: set[str] = set()
        for of_names in alike.values():
            below = dominated(np.array([values for _, values in of_names]))
            found |= {name for (name, _), is_below in zip(of_names, below.tolist(), strict=True) if is_below}
        return found


def dominated(rewards: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return [n]: whether some row of `rewards` [n, k] is at least as large in every column and larger in one."""
    at_least = (rewards[:, None, :] >= rewards[None, :, :]).all(-1)
    larger = (rewards[:, None, :] > rewards[None, :, :]).any(-1)
    found: NDArray[np.bool_] = np.any(at_least & larger, axis=0)
    return found
