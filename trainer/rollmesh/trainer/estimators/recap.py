"""GRPO whose objectives are weighted by how their rewards change (RECAP, 2025-10, arXiv:2510.21978, no public code).

A run that reasons and keeps general abilities has tasks of several objectives, such as the sources of a mixture. The
objective of a sample is the label `label` of its task. With x the mean weighted reward sums of an objective in its last
`window` batches, and b and e the slope and the residuals of a least-squares line through them:

    convergence  c_i = |b_i| (window - 1)                      change of the mean reward over the window
    instability  v_i = std of e_i
    score        s_i = convergence_weight c_i + instability_weight v_i
    weight       w_i = f + (1 - K f) softmax_i(s / temperature),   f = min(weight_min, 1 / K)      sum over the K objectives: 1
    factor       K w_i, of every sample of the objective in the loss

An objective whose reward is flat has the score 0, whatever its level, and loses weight to those that converge or are
volatile. One with fewer than `window` batches has the mean score of the others, and all are equal before any has
`window`. A batch without samples of an objective leaves it unchanged. Advantages are those of `grpo`. The means are in
the checkpoint. Weights are in the metrics `weight/OBJECTIVE`, and `convergence/` and `instability/` with them.

The abstract states short-horizon signals of convergence and instability, less weight for saturated objectives, and more
for underperforming or volatile ones. The formula is not established, so the one above is our own; an objective that is
low and flat does not gain, because its groups without a success have no gradient either. The paper also replays
general-capability data; a mixture samples new episodes of its tasks. Groups whose rewards agree belong to the means, so the recipe
has the finalizer `keep_all`.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np
from msgspec import Meta

from rollmesh.shared.config.settings import NonEmptyStr, NonNegativeFloat, PositiveFloat, Settings, Share
from rollmesh.trainer.estimators.base import Estimate, episode_weights
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.batch import UpdateBatch

OBJECTIVES_MAX = 64
"""Most objectives that have a weight, as many as a mixture has sources. Further ones share the last."""
OTHER = "other"
"""Objective of tasks without the label, and of those beyond `OBJECTIVES_MAX`."""


class RecapOptions(GrpoOptions):
    """Settings of the estimator `recap`: those of `grpo`, and the weights of objectives."""

    label: NonEmptyStr = "source"
    """Label of a task that is its objective. Tasks of a mixture have the label `source`."""
    window: Annotated[int, Meta(ge=3, le=1000)] = 10
    """Batches with an objective from which its signals follow."""
    convergence_weight: NonNegativeFloat = 1.0
    """Factor of the change of the mean reward over the window."""
    instability_weight: NonNegativeFloat = 1.0
    """Factor of the standard deviation around the line."""
    temperature: PositiveFloat = 0.1
    """Temperature of the softmax, in units of the reward. A low one prefers the objective of the largest score."""
    weight_min: Share = 0.05
    """Least weight of an objective."""


class Signals(NamedTuple):
    """How the mean rewards of an objective change."""

    convergence: float
    instability: float


class Recap(Grpo):
    """See the module."""

    Options: ClassVar[type[Settings]] = RecapOptions

    def __init__(self, *, weights: Mapping[str, float], options: RecapOptions) -> None:
        super().__init__(weights=weights, options=options)
        self._means: dict[str, list[float]] = {}
        """Objective -> its last mean rewards, oldest first."""

    def __call__(self, batch: UpdateBatch) -> Estimate:
        base = super().__call__(batch)
        if batch.repeat == 0:
            self._observe(batch)
        signals = {name: signals_of(means) for name, means in self._means.items() if self._is_known(means)}
        weights = self._weights(signals)
        factors = [len(weights) * weights.get(self._objective(g.labels), 0.0) for g in batch.contexts]
        metrics = {f"weight/{name}": value for name, value in weights.items()}
        for name, found in signals.items():
            metrics |= {f"convergence/{name}": found.convergence, f"instability/{name}": found.instability}
        return replace(base, sample_weights=np.array(factors, np.float32), metrics={**base.metrics, **metrics})

    def state(self) -> dict[str, Any]:
        return {"means": self._means}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._means = {name: list(means) for name, means in state["means"].items()}

    def _objective(self, labels: Mapping[str, str]) -> str:
        name = labels.get(self.options.label) or OTHER
        return name if name in self._means or len(self._means.keys() - {OTHER}) < OBJECTIVES_MAX - 1 else OTHER

    def _observe(self, batch: UpdateBatch) -> None:
        """Append the mean reward of each objective of the batch."""
        of_groups: dict[str, list[float]] = {}
        for group in batch.groups:
            members, sums = self.reward_sums(group)
            if members:
                name = self._objective(group.labels)
                self._means.setdefault(name, [])
                of_groups.setdefault(name, []).append(float(episode_weights(members) @ sums))
        for name, means in of_groups.items():
            self._means[name].append(float(np.mean(means)))
            del self._means[name][: -self.options.window]

    def _is_known(self, means: list[float]) -> bool:
        window: int = self.options.window
        return len(means) == window

    def _weights(self, signals: Mapping[str, Signals]) -> dict[str, float]:
        """Return the weight of each objective so far; their sum is 1."""
        options: RecapOptions = self.options
        scores = {
            name: options.convergence_weight * one.convergence + options.instability_weight * one.instability
            for name, one in signals.items()
        }
        neutral = float(np.mean(list(scores.values()))) if scores else 0.0
        values = np.array([scores.get(name, neutral) for name in self._means]) / options.temperature
        shares = np.exp(values - values.max(initial=0.0))
        shares /= shares.sum()
        least = min(options.weight_min, 1 / max(1, len(shares)))
        weights = least + (1 - least * len(shares)) * shares
        return dict(zip(self._means, weights.tolist(), strict=True))


def signals_of(means: list[float]) -> Signals:
    """Return the signals of mean rewards, oldest first, at least three."""
    at = np.arange(len(means)) - (len(means) - 1) / 2
    values = np.array(means)
    slope = float(at @ values / (at @ at))
    residuals = values - values.mean() - slope * at
    return Signals(abs(slope) * (len(means) - 1), float(residuals.std()))
