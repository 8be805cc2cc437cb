"""Advantage against a success rate that is predicted from past prompts and their outcomes (V0, 2026-02,
arXiv:2602.03584).

The predictor has no parameters. It holds a context of pairs (features of a prompt, mean reward of its episodes) of the
last updates, which describes what the policy can do. For a prompt with features x,

    V(x) = (m r + sum_j n_j k_j r_j) / (m + sum_j n_j k_j),   k_j = exp((cos(x, x_j) - 1) / bandwidth),   A = R - V(x)

with r_j the mean reward and n_j the episodes of pair j, and r the mean of the context, which counts as m =
`mean_weight` episodes. The context is that before the update, so that the baseline does not depend on the rewards of
the prompt itself and is unbiased also for one episode per group. Pairs of a weaker policy give lower predictions,
without any training, and the oldest pairs are dropped. The context is in the checkpoint. Before the first update, V is
`initial`.

Features are counts of the tokens before the first action and of the labels of the task, each multiplied by log((N + 1)
/ (n + 1)), where n of the N pairs have it, so that what all prompts share has no weight.

Deviations: the paper embeds the prompt with a frozen encoder and predicts with a pretrained in-context model for
tables; kernel regression over counts takes the place of both, needs no model, and knows nothing before the first
update. The paper allocates rollouts with the prediction, and routes requests by it, which is missing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import log
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings, Share
from rollmesh.shared.domain.trajectory import GroupContext, Role, TrainingSample
from rollmesh.trainer.estimators.base import (
    Estimate,
    GroupEstimator,
    episode_weights,
    spread,
    undecided,
)

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch

Features = Mapping[str, int]
"""Feature of a prompt -> its count."""


class V0Options(Settings):
    """Settings of the estimator `v0`."""

    context_max: PositiveInt = 512
    """Pairs of the context. Older ones are dropped, so that it follows the policy."""
    bandwidth: PositiveFloat = 0.1
    """Distance, 1 minus the cosine, at which a pair counts 1 / e of an identical prompt."""
    mean_weight: PositiveFloat = 1.0
    """Weight of the mean of the context, in episodes (m)."""
    initial: Share = 0.5
    """Prediction without a context."""
    prompt_tokens_max: PositiveInt = 512
    """Number of tokens before the first action that are read, the last ones of a longer prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A prompt and its outcome."""

    features: Features
    reward: float
    """Mean reward of its episodes."""
    episodes: int
    """Number of its episodes."""


class V0(GroupEstimator):
    """Predict the reward of each prompt from the context, then extend the context."""

    Options: ClassVar[type[Settings]] = V0Options
    needs_behavior = False

    def __init__(self, *, weights: Mapping[str, float], options: V0Options) -> None:
        super().__init__(weights=weights, options=options)
        self._context: deque[Pair] = deque(maxlen=options.context_max)
        self._predicted: dict[str, float] = {}
        """Group -> prediction before the last batch, for further estimates of it."""

    def __call__(self, batch: UpdateBatch) -> Estimate:
        leased: dict[str, TrainingSample] = {}
        for sample in batch.samples:
            leased.setdefault(sample.group, sample)
        prompts = {g.group: self.features_of(g, leased.get(g.group)) for g in batch.groups}
        if batch.repeat == 0:
            values = self.predict(list(prompts.values()))
            self._predicted = dict(zip(prompts, values.tolist(), strict=True))
        advantages: dict[str, float] = {}
        outcomes: dict[str, float] = {}
        for group in batch.groups:
            members, sums = self.reward_sums(group)
            if not members:
                continue
            centered = sums - self._predicted[group.group]
            advantages |= {m.sample_id: a for m, a in zip(members, centered.tolist(), strict=True)}
            outcomes[group.group] = float(episode_weights(members) @ sums)
            if batch.repeat == 0:
                num = len({m.episode or m.sample_id for m in members})
                self._context.append(Pair(features=prompts[group.group], reward=outcomes[group.group], episodes=num))
        estimate = spread(batch, advantages)
        metrics = self._metrics(outcomes)
        return Estimate(advantages=estimate.advantages, dropped=estimate.dropped, metrics=metrics)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return `UNDECIDED` for each member with usable rewards, because the context decides."""
        return undecided(group)

    def predict(self, prompts: Sequence[Features]) -> NDArray[np.float64]:
        """Return the predicted mean reward [n] of prompts."""
        options: V0Options = self.options
        pairs = list(self._context)
        if not pairs:
            return np.full(len(prompts), options.initial)
        episodes = np.array([pair.episodes for pair in pairs], dtype=np.float64)
        rewards = np.array([pair.reward for pair in pairs])
        cosines = _cosines(prompts, [pair.features for pair in pairs])
        weights = episodes * np.exp((cosines - 1.0) / options.bandwidth)
        mean = float(episodes @ rewards / episodes.sum())
        predicted: NDArray[np.float64] = (options.mean_weight * mean + weights @ rewards) / (
            options.mean_weight + weights.sum(axis=1)
        )
        return predicted

    def features_of(self, group: GroupContext, sample: TrainingSample | None) -> dict[str, int]:
        """Return the features of the prompt of a group: its labels, and the tokens before the first action of one of
        its samples."""
        found = Counter(f"{key}={value}" for key, value in group.labels.items())
        if sample is not None:
            before = takewhile(lambda segment: segment.role is not Role.ACTION, sample.segments)
            tokens = [token for segment in before for token in segment.token_ids.tolist()]
            found.update(str(token) for token in tokens[-self.options.prompt_tokens_max :])
        return dict(found)

    def state(self) -> dict[str, Any]:
        return {"context": [[dict(p.features), p.reward, p.episodes] for p in self._context]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._context.clear()
        self._context.extend(
            Pair(features=dict(features), reward=reward, episodes=episodes)
            for features, reward, episodes in state["context"]
        )

    def _metrics(self, outcomes: Mapping[str, float]) -> dict[str, float]:
        predicted = np.array([self._predicted[group] for group in outcomes])
        reached = np.array(list(outcomes.values()))
        return {
            "context": float(len(self._context)),
            "predicted_mean": float(predicted.mean()) if len(predicted) else self.options.initial,
            "squared_error": float(np.square(predicted - reached).mean()) if len(predicted) else 0.0,
            "rank_correlation": rank_correlation(predicted, reached),
        }


def _cosines(prompts: Sequence[Features], context: Sequence[Features]) -> NDArray[np.float64]:
    """Return [prompts, pairs]: cosines of the counts, weighted by how rare a feature is in the context."""
    known = Counter(name for features in context for name in features)
    names = {name: k for k, name in enumerate(dict.fromkeys(name for f in (*prompts, *context) for name in f))}
    vectors = np.zeros((len(prompts) + len(context), len(names)))
    for i, features in enumerate((*prompts, *context)):
        for name, count in features.items():
            vectors[i, names[name]] = count * log((len(context) + 1) / (known[name] + 1))
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    cosines: NDArray[np.float64] = vectors[: len(prompts)] @ vectors[len(prompts) :].T
    return cosines


def rank_correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Return Spearman's rank correlation, with mean ranks of equal values; 0 if all values of one are equal."""
    ranks = [(v[:, None] > v).sum(axis=1) + (v[:, None] == v).sum(axis=1) / 2 for v in (one, other)]
    a, b = (r - r.mean() if len(r) else r for r in ranks)
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm else 0.0
