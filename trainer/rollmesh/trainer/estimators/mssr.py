"""Advantage against a tracked pass rate of the prompt, for one rollout per prompt (MSSR, arXiv:2512.18215; code:
ruiiu/MSSR).

Per prompt x a Beta distribution, which begins at a = N0 v0, b = N0 (1 - v0) with N0 = 1 / (1 - rho_min):

    V(x) = a / (a + b),   A = R - V(x), before the update;   then a <- rho a + R,   b <- rho b + (1 - R)
    A    = (A - mean_batch A) / (std_batch A + epsilon)
    A_t <- A_t + min(entropy_weight H_t, |A_t| / kappa)              entropy shaping, H_t in nats, without gradient

rho is the share of the past that is kept, within [rho_min, rho_max]: rho = 2 ^ (-KL / kl_half), with the KL per token
of the last update (k3, in nats). So a policy that changes fast forgets fast. The shaping never changes the sign of an
advantage, because kappa > 1. The Beta distributions are in the checkpoint.

Deviations: the code adapts rho linearly to a mean of KL values, or per prompt since its last visit; here one rho is for
all prompts of an update. R is limited to [0, 1], and may be a fraction, where the code rounds. Every prompt begins at
v0, where the code samples the data set once. H is the entropy of the policy at the start of the update, over the whole
vocabulary; the code takes -log p of the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, Settings, Share
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.estimators.base import (
    Estimate,
    GroupEstimator,
    centered,
    episode_means,
    episode_weights,
    spread,
    undecided,
)

if TYPE_CHECKING:  # they import torch
    from rollmesh.trainer.batch import UpdateBatch
    from rollmesh.trainer.features import FeatureRequest

ENTROPY = "start_entropy"
_Kept = Annotated[float, Meta(gt=0, lt=1)]


class MssrOptions(Settings):
    """Settings of the estimator `mssr`."""

    rho_min: _Kept = 0.875
    """Smallest share of the past that an update keeps; 1 / (1 - rho_min) is the weight of the initial value, in
    visits."""
    rho_max: _Kept = 0.96
    """Largest share of the past that an update keeps."""
    kl_half: PositiveFloat = 0.06
    """KL of the last update, in nats per token, at which half of the past would be kept."""
    initial: Share = 0.5
    """Pass rate of a prompt before its first visit (v0)."""
    entropy_weight: NonNegativeFloat = 0.4
    """Advantage per nat of entropy. 0 needs no entropy."""
    kappa: Annotated[float, Meta(gt=1)] = 2.0
    """The shaping is at most this fraction of the advantage."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation of the batch."""

    def check_fields(self) -> None:
        if self.rho_min > self.rho_max:
            raise ValueError(f"`rho_min` must be <= rho_max = {self.rho_max}, got {self.rho_min}")


class Mssr(GroupEstimator):
    """Tracked pass rates, normalized over the batch, with entropy shaping."""

    Options: ClassVar[type[Settings]] = MssrOptions
    needs_behavior = False

    def __init__(self, *, weights: Mapping[str, float], options: MssrOptions) -> None:
        super().__init__(weights=weights, options=options)
        self._beta: dict[str, tuple[float, float]] = {}
        """Task -> (a, b)."""
        self._before: dict[str, float] = {}
        """Task -> pass rate before the last batch, for further estimates of it."""

    @property
    def needs(self) -> tuple[str, ...]:
        return (ENTROPY,) if self.options.entropy_weight else ()

    @property
    def features(self) -> dict[str, FeatureRequest]:
        if not self.options.entropy_weight:
            return {}
        from rollmesh.trainer.features import (
            FeatureRequest,  # they import torch, which the reward service does not have
        )
        from rollmesh.trainer.vocabulary_features import Entropy

        return {ENTROPY: FeatureRequest(Entropy(), "start")}

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: MssrOptions = self.options
        rho = self.rho(batch.last.get("kl"))
        if batch.repeat == 0:
            self._before = {group.task: self.value(group.task) for group in batch.groups}
            for group in batch.groups:
                self._visit(group, rho)
        scored = [(group, *self.reward_sums(group)) for group in batch.groups]
        members = [m for _, mine, _ in scored for m in mine]
        raw = np.concatenate([np.empty(0), *(sums - self._before[group.task] for group, _, sums in scored)])
        normalized = centered(raw, episode_weights(members), options.epsilon) if len(raw) > 1 else raw
        found = spread(batch, {m.sample_id: a for m, a in zip(members, normalized.tolist(), strict=True)})
        advantages = found.advantages
        if options.entropy_weight:
            bonus = np.minimum(options.entropy_weight * batch[ENTROPY], np.abs(advantages) / options.kappa)
            advantages = (advantages + bonus).astype(np.float32)
        value = float(np.mean(list(self._before.values()))) if self._before else options.initial
        metrics = {"rho": rho, "value_mean": value, "prompts": len(self._beta)}
        return Estimate(advantages=advantages, dropped=found.dropped, metrics=metrics)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return `UNDECIDED` for each member with usable rewards, because the history of the prompt and the batch
        decide."""
        return undecided(group)

    def value(self, task: str) -> float:
        """Return the pass rate of a prompt."""
        a, b = self._beta.get(task, self._prior)
        return a / (a + b)

    def rho(self, kl: float | None) -> float:
        """Return the share of the past to keep after an update with this KL per token; None before the first update."""
        kept: float = 2.0 ** (-max(0.0, kl or 0.0) / self.options.kl_half)
        options: MssrOptions = self.options
        return min(max(kept, options.rho_min), options.rho_max)

    def state(self) -> dict[str, Any]:
        return {"beta": {task: list(ab) for task, ab in self._beta.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._beta = {task: (a, b) for task, (a, b) in state["beta"].items()}

    @property
    def _prior(self) -> tuple[float, float]:
        weight = 1.0 / (1.0 - self.options.rho_min)
        return weight * self.options.initial, weight * (1.0 - self.options.initial)

    def _visit(self, group: GroupContext, rho: float) -> None:
        """Count every episode of the group as one visit."""
        for reward in episode_means(*self.reward_sums(group)).values():
            a, b = self._beta.get(group.task, self._prior)
            passed = min(max(reward, 0.0), 1.0)
            self._beta[group.task] = (rho * a + passed, rho * b + 1.0 - passed)
