"""Per-token numbers collected over the optimizer steps of one update, and their summary.

Collaborators: `update` (records), `metrics` (definitions).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollmesh.shared.domain.trajectory import FloatArray, TrainedGroup
from rollmesh.trainer.metrics import drift_metrics, limited_log_ratio, mean_stats
from rollmesh.trainer.samples import TokenTable


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One optimizer step that was taken: its tokens, their log-probs `policy` [m] before the step, and loss statistics
    [m].

    `lr_factor` is the factor of the learning rate that the update rule chose.
    """

    table: TokenTable
    policy: FloatArray
    stats: Mapping[str, FloatArray]
    loss: float
    grad_norm: float
    fill: float
    saved: float
    lr_factor: float


@dataclass(slots=True)
class UpdateTrace:
    """The steps taken so far."""

    steps: list[StepTrace] = field(default_factory=list)
    measures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Group -> name -> number: what the first estimate of the update measured, see `Estimate.measures`."""

    def summary(self) -> dict[str, float]:
        """Return metrics over all trained tokens; only the count of steps if no step was taken."""
        if not self.steps:
            return {"steps_taken": 0.0}
        policy = np.concatenate([s.policy for s in self.steps])
        behavior, lag, truncated = (
            np.concatenate([s.table.columns[name] for s in self.steps]) for name in ("behavior", "lag", "truncated")
        )
        names = dict.fromkeys(name for s in self.steps for name in s.stats)
        stats = {
            name: np.concatenate([s.stats.get(name, np.full_like(s.policy, np.nan)) for s in self.steps])
            for name in names
        }
        entropy = stats.pop("entropy", None)
        sampled = np.isfinite(behavior)
        return {
            "steps_taken": float(len(self.steps)),
            "loss": float(np.mean([s.loss for s in self.steps])),
            "grad_norm": float(np.mean([s.grad_norm for s in self.steps])),
            "lr_factor": float(np.mean([s.lr_factor for s in self.steps])),
            "tokens/trained": float(len(policy)),
            "tokens/fill": float(np.mean([s.fill for s in self.steps])),
            "tokens/prefix_saved_share": float(np.mean([s.saved for s in self.steps])),
            "tokens/truncated_share": float(truncated.mean()),
            "tokens/external_share": float(1 - sampled.mean()),
            **drift_metrics(policy[sampled], behavior[sampled], lag[sampled]),
            **mean_stats(stats),
            **({} if entropy is None else {"entropy": float(entropy.mean())}),
        }

    def groups(self, names: Sequence[str]) -> Iterator[TrainedGroup]:
        """Yield what the steps measured on each group with used tokens. `names` are the groups by the numbers of the
        column `group`.

        A sampled token counts with its advantage and its ratio in its first step; external tokens have no ratio. A
        group whose means are not finite is omitted. The measures of the estimator are added.
        """
        if not self.steps:
            return
        sample, position, group, advantages, behavior = (
            np.concatenate([s.table.columns[name] for s in self.steps])
            for name in ("sample", "position", "group", "advantages", "behavior")
        )
        policy = np.concatenate([s.policy for s in self.steps])
        _, first = np.unique(sample * (position.max(initial=0) + 1) + position, return_index=True)
        first = first[np.isfinite(behavior[first])]
        loss = -np.exp(limited_log_ratio(policy, behavior)) * advantages
        values = np.stack([np.abs(advantages), loss])[:, first]
        for number, name in enumerate(names):
            mine = values[:, group[first] == number]
            if mine.size and np.isfinite(mine).all():
                means = zip(("mean_abs_advantage", "policy_loss"), mine.mean(axis=1).tolist(), strict=True)
                built_in = {**dict(means), "num_tokens": float(mine.shape[1])}
                yield TrainedGroup(group=name, measures={**built_in, **self.measures.get(name, {})})
