"""GRPO on samples whose rewards are reliable (policy filtration, PF-PPO, 2024-09, arXiv:2409.06957; code: verl,
compute_pf_ppo_reweight_data).

A reward model errs least at its extreme scores, so that samples are weighted by their reward R before the update:

    pow          w = |R|^power
    max_min      w = 1 for the best and the worst reward, else 0
    max_random   w = 0.4 for the best reward, else 0.1
    all          w = 1

`truth` names a reward that is the true score, where it is known. It is never optimized. Then the strategy with the
largest R^2 applies, the squared correlation of reward and true score under the weights w, over the last `groups_max`
groups with true scores, of this update and those before it. `all` is one of the strategies, so that the R^2 of the
filtered samples is never below that of all. Before the first true score, and without `truth`, `strategy` applies. The
groups are in the checkpoint; a refreshed batch counts once.

Deviations: verl draws a batch of the same size with these probabilities, and here w is the weight of the sample in the
loss, which is the expected number of draws; samples with w = 0 are dropped. Best and worst are those of the group, or
with `scope: batch` those of the batch, as in verl. The advantages are those of `grpo` over all members, where the paper
has a critic. If all w are 0, all samples have the same weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import DOWN_SAMPLED, Estimate, usable_rewards, without_reward
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch

Strategy = Literal["pow", "max_min", "max_random", "all"]
STRATEGIES: tuple[Strategy, ...] = ("pow", "max_min", "max_random", "all")


class PfPpoOptions(GrpoOptions):
    """Settings of the estimator `pf_ppo`: those of `grpo`, and the filter."""

    strategy: Strategy = "max_min"
    """How samples are weighted by their rewards, as long as no true score decides."""
    power: PositiveFloat = 2.0
    """Exponent of `pow`."""
    scope: Literal["group", "batch"] = "group"
    """Samples whose rewards are compared with each other."""
    truth: str = ""
    """Name of a reward that is the true score of a sample, by which the strategy is chosen. Empty: none."""
    groups_max: PositiveInt = 256
    """Number of groups with true scores that are compared, the newest ones."""


class PfPpo(Grpo):
    """Weight samples by the reliability of their rewards."""

    Options: ClassVar[type[Settings]] = PfPpoOptions

    def __init__(self, *, weights: Mapping[str, float], options: PfPpoOptions) -> None:
        super().__init__(weights=weights, options=options)
        self._labeled: list[tuple[list[float], list[float]]] = []
        """Rewards and true scores of the members of each group that has some."""

    @property
    def rewards(self) -> tuple[str, ...]:
        return (self.options.truth,) if self.options.truth else ()

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: PfPpoOptions = self.options
        scored = [self.reward_sums(group) for group in batch.groups]
        if options.truth and batch.repeat == 0:
            self._remember(batch.groups, scored)
        agreement = {name: self._agreement(name) for name in STRATEGIES}
        chosen = max((options.strategy, *STRATEGIES), key=lambda name: agreement[name])
        pools = scored
        if options.scope == "batch":
            members = [m for of_group, _ in scored for m in of_group]
            pools = [(members, np.concatenate([np.zeros(0), *(sums for _, sums in scored)]))]
        of_sample: dict[str, float] = {}
        for members, sums in pools:
            found = filter_weights(chosen, sums, options.power).tolist()
            of_sample |= {m.sample_id: weight for m, weight in zip(members, found, strict=True)}
        weights = np.array([of_sample.get(s.sample.sample_id, 0.0) for s in batch.samples])
        estimate = self.spread(batch, self.of_sums(scored, self.given(batch)))
        candidates = [n for n in range(len(weights)) if n not in estimate.dropped]
        at = [n for n in candidates if weights[n] == 0]
        dropped = {**dict.fromkeys(at, DOWN_SAMPLED), **estimate.dropped}
        used = [n for n in candidates if n not in dropped]
        if used:
            weights = weights / weights[used].mean()
        metrics = {
            "filtered_share": len(at) / max(1, len(candidates)),
            "strategy": float(STRATEGIES.index(chosen)),
            "agreement": agreement[chosen],
            "agreement_all": agreement["all"],
        }
        return replace(
            estimate,
            sample_weights=weights.astype(np.float32),
            dropped=dropped,
            metrics={**estimate.metrics, **metrics},
        )

    def reward_sums(self, group: GroupContext) -> tuple[list[MemberOutcome], NDArray[np.float64]]:
        """Return the members that have usable rewards beside the true score, and their sums, both without it."""
        return super().reward_sums(without_reward(group, self.options.truth))

    def state(self) -> dict[str, Any]:
        return {"labeled": [[list(rewards), list(truths)] for rewards, truths in self._labeled]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._labeled = [(list(rewards), list(truths)) for rewards, truths in state["labeled"]]

    def _remember(
        self, groups: Sequence[GroupContext], scored: Sequence[tuple[list[MemberOutcome], NDArray[np.float64]]]
    ) -> None:
        """Keep the rewards and true scores of the newest groups that have both."""
        for group, (members, sums) in zip(groups, scored, strict=True):
            of_members = {m.sample_id: (usable_rewards(m) or {}).get(self.options.truth) for m in group.members}
            truths = [of_members[m.sample_id] for m in members]
            pairs = [(value, truth) for value, truth in zip(sums.tolist(), truths, strict=True) if truth is not None]
            if pairs:
                self._labeled.append(([value for value, _ in pairs], [truth for _, truth in pairs]))
        self._labeled = self._labeled[-self.options.groups_max :]

    def _agreement(self, strategy: Strategy) -> float:
        """Return the R^2 of a strategy over the groups with true scores; 0 without any."""
        options: PfPpoOptions = self.options
        rewards = [np.array(values) for values, _ in self._labeled]
        if not rewards:
            return 0.0
        pools = [np.concatenate(rewards)] if options.scope == "batch" else rewards
        weights = np.concatenate([filter_weights(strategy, values, options.power) for values in pools])
        return r_squared(np.concatenate(rewards), np.concatenate([truths for _, truths in self._labeled]), weights)


def filter_weights(strategy: Strategy, rewards: NDArray[np.float64], power: float) -> NDArray[np.float64]:
    """Return the weights [n] of samples that are compared with each other, with mean 1."""
    if not len(rewards):
        return np.zeros(0)
    best, worst = rewards == rewards.max(), rewards == rewards.min()
    weights: NDArray[np.float64] = {
        "pow": np.abs(rewards) ** power,
        "max_min": (best | worst).astype(np.float64),
        "max_random": np.where(best, 0.4, 0.1),
        "all": np.ones(len(rewards)),
    }[strategy]
    total = weights.sum()
    return weights * (len(rewards) / total) if total > 0 else np.ones(len(rewards))


def r_squared(rewards: NDArray[np.float64], truths: NDArray[np.float64], weights: NDArray[np.float64]) -> float:
    """Return the coefficient of determination of the linear regression of truths [n] on rewards [n] with weights [n]; 0
    if one of them is constant."""
    weights = weights / weights.sum()
    rewards, truths = rewards - weights @ rewards, truths - weights @ truths
    spread = float((weights @ np.square(rewards)) * (weights @ np.square(truths)))
    return float(weights @ (rewards * truths)) ** 2 / spread if spread > 1e-18 else 0.0
