"""Advantage against a tracked pass rate of the prompt, for one rollout per prompt (MSSR, arXiv:2512.18215; code:
ruiiu/MSSR).

Per prompt x a Beta distribution, which begins at a = N0 v0, b = N0 (1 - v0) with N0 = 1 / (1 - rho_min):

    V(x) = a / (a + b),   A = R - V(x), before the update;   then a <- rho a + R,   b <- rho b + (1 - R)
    A    = (A - mean_batch A) / (std_batch A + epsilon)
    A_t <- A_t + min(entropy_weight H_t, |A_t| / kappa),   H_t = -p_t log p_t         entropy shaping, without gradient

p_t is the probability of the token at the start of the update, as in the code, whose H is at most 0.37; `entropy:
vocabulary` takes the entropy over the vocabulary, of which the code calls H an estimate. rho is the share of the past
that is kept, within [rho_min, rho_max]: rho = 2 ^ (-KL / kl_half), with the KL per token of the last update (k3, in
nats). So a policy that changes fast forgets fast. The shaping never changes the sign of an advantage, because kappa >
1. The Beta distributions are in the checkpoint.

v0 is the mean reward of the first visit of the prompt, whose samples are not trained (reason FIRST_VISIT). With the
selector `uniform`, which draws every prompt once per epoch, the first epoch is the pass over the data set of the
initial policy with which the code begins: no update of it is applied. `first_visit: train` begins at `initial` and
trains at once.

Deviations: the code adapts rho linearly to a mean of KL values, or per prompt since its last visit; here one rho is for
all prompts of an update. R is limited to [0, 1], and may be a fraction, where the code rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

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
    usable_rewards,
)

if TYPE_CHECKING:  # they import torch
    from rollmesh.trainer.batch import UpdateBatch
    from rollmesh.trainer.features import FeatureRequest

ENTROPY = "start_entropy"
FIRST_VISIT = "FIRST_VISIT"
"""Reason of a sample whose reward has set the first pass rate of its prompt."""
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
    first_visit: Literal["initialize", "train"] = "initialize"
    """`initialize` takes the mean reward of the first visit of a prompt as v0, and does not train its samples. `train`
    begins at `initial`."""
    initial: Share = 0.5
    """Pass rate of a prompt before its first visit (v0), with `first_visit: train`."""
    entropy_weight: NonNegativeFloat = 0.4
    """Advantage per nat of entropy. 0 needs no entropy."""
    entropy: Literal["token", "vocabulary"] = "token"
    """H: -p log p of the sampled token, or the entropy over the vocabulary."""
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
        """Task -> pass rate before the last batch, for further estimates of it, as the next one."""
        self._first: frozenset[str] = frozenset()
        """Tasks that the last batch has visited for the first time, and that are therefore not trained."""

    @property
    def needs(self) -> tuple[str, ...]:
        if not self.options.entropy_weight:
            return ()
        return ("proximal",) if self.options.entropy == "token" else (ENTROPY,)

    @property
    def features(self) -> dict[str, FeatureRequest]:
        if ENTROPY not in self.needs:
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
            self._visit_all(batch.groups, rho)
        trained = [group for group in batch.groups if group.task not in self._first]
        scored = [(group, *self.reward_sums(group)) for group in trained]
        members = [m for _, mine, _ in scored for m in mine]
        raw = np.concatenate([np.empty(0), *(sums - self._before[group.task] for group, _, sums in scored)])
        normalized = centered(raw, episode_weights(members), options.epsilon) if len(raw) > 1 else raw
        found = spread(batch, {m.sample_id: a for m, a in zip(members, normalized.tolist(), strict=True)})
        advantages = found.advantages
        if options.entropy_weight:
            bonus = np.minimum(options.entropy_weight * self._entropy(batch), np.abs(advantages) / options.kappa)
            advantages = (advantages + bonus).astype(np.float32)
        first = {
            n: FIRST_VISIT for n in found.dropped if batch.samples[n].task in self._first and self._usable(batch, n)
        }
        value = float(np.mean(list(self._before.values()))) if self._before else options.initial
        share = 1.0 - len(trained) / max(1, len(batch.groups))
        metrics = {"rho": rho, "value_mean": value, "prompts": len(self._beta), "first_visit_share": share}
        return Estimate(advantages=advantages, dropped={**found.dropped, **first}, metrics=metrics)

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

    def _entropy(self, batch: UpdateBatch) -> NDArray[np.float64]:
        """Return H [M]."""
        if self.options.entropy == "vocabulary":
            return np.asarray(batch[ENTROPY], np.float64)
        logprobs = np.asarray(batch["proximal"], np.float64)
        return -np.exp(logprobs) * logprobs

    def _visit_all(self, groups: Sequence[GroupContext], rho: float) -> None:
        """Count every episode of a group as one visit of its task, unless it is the first visit that sets v0."""
        self._before = {group.task: self.value(group.task) for group in groups}
        known = self._beta.copy() if self.options.first_visit == "initialize" else self._before
        self._first = frozenset(group.task for group in groups if group.task not in known)
        outcomes: dict[str, list[float]] = {}
        for group in groups:
            passed = [min(max(r, 0.0), 1.0) for r in episode_means(*self.reward_sums(group)).values()]
            outcomes.setdefault(group.task, []).extend(passed)
        weight = 1.0 / (1.0 - self.options.rho_min)
        for task, passed in outcomes.items():
            if task in self._first:
                if passed:
                    v0 = float(np.mean(passed))
                    self._beta[task] = (weight * v0, weight * (1.0 - v0))
                continue
            for reward in passed:
                a, b = self._beta.get(task, self._prior)
                self._beta[task] = (rho * a + reward, rho * b + 1.0 - reward)

    def _usable(self, batch: UpdateBatch, number: int) -> bool:
        return usable_rewards(batch.members[number]) is not None
