"""The estimator port, its built-in estimators, and how they read a reward vector.

Which rewards count: those about the whole sample with outcome OK. An INFRA_FAILURE says nothing about the model, so such a member is
excluded from every mean, and as a sample it has no advantage at all (never a zero score). NOT_APPLICABLE excludes that one reward of
that one member.
A baseline counts episodes, not samples: a mean is taken over the samples of each episode, then over episodes.
Members that will not be trained (stale, filtered) stay in the statistics, because a baseline without them would be biased.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.registry import Extension, Registry
from rollmesh.shared.trajectory import (
    WHOLE_SAMPLE,
    FloatArray,
    GroupContext,
    MemberOutcome,
    Outcome,
    TrainingSample,
)

ESTIMATORS = Registry(
    "estimator",
    {"grpo": "rollmesh.trainer.estimators.grpo:Grpo", "gdpo": "rollmesh.trainer.estimators.gdpo:Gdpo"},
)

SegmentAdvantages = tuple[FloatArray, ...]
"""One array per segment of a sample's path, each broadcastable to [tokens of the segment]."""


class Estimator(Protocol):
    """A pure function from the rewards of groups to the advantages of samples.

    Constructed as `cls(weights=..., options=...)`, without `options` if the class has no `Options`. `weights` is `reward.weights`:
    reward name -> weight. A reward that it does not name is recorded and not optimized. Empty: every reward has weight 1.
    """

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> its advantage as far as its group alone decides it, for the members that have usable rewards.

        If all are 0, the group has no gradient, and finalizers filter it.
        """
        ...

    def __call__(
        self, groups: Sequence[GroupContext], samples: Sequence[TrainingSample]
    ) -> list[SegmentAdvantages | None]:
        """Return one entry per sample, in order. An entry is None where the sample has no usable reward.

        Raises ValueError if the group of a sample is not among `groups`, or does not list the sample.
        """
        ...


class GroupEstimator:
    """Base of estimators that are functions of one group. A subclass defines `of_group`."""

    def __init__(self, *, weights: Mapping[str, float], options: Any = None) -> None:
        self.weights = weights
        self.options = options

    def __call__(
        self, groups: Sequence[GroupContext], samples: Sequence[TrainingSample]
    ) -> list[SegmentAdvantages | None]:
        check_membership(groups, samples)
        return spread_over_samples({g.group: self.of_group(g) for g in groups}, samples)

    def of_group(self, group: GroupContext) -> dict[str, float]:
        raise NotImplementedError

    def weight_of(self, reward: str) -> float:
        """Return the weight of a reward in the run."""
        return self.weights.get(reward, 0.0) if self.weights else 1.0


def make_estimator(
    chosen: Extension | str, weights: Mapping[str, float] | None = None, base_dir: str | Path | None = None
) -> Estimator:
    """Construct an estimator. A user's file is relative to `base_dir`. Raises ConfigError."""
    made = ESTIMATORS.make(chosen, base_dir, weights=dict(weights or {}))
    return cast(Estimator, made)


def usable_rewards(member: MemberOutcome) -> dict[str, float] | None:
    """Return name -> value of a member's whole-sample rewards. None if the infrastructure failed, or if nothing was scored.

    A value that is not finite counts as a failure of the scorer.
    """
    whole = [r for r in member.rewards if r.segment == WHOLE_SAMPLE]
    if any(r.outcome is Outcome.INFRA_FAILURE or (r.outcome is Outcome.OK and not isfinite(r.value)) for r in whole):
        return None
    return {r.name: r.value for r in whole if r.outcome is Outcome.OK} or None


def episode_weights(members: Sequence[MemberOutcome]) -> NDArray[np.float64]:
    """Return weights [n] of members in a mean, with sum 1. Every episode counts once, shared by its samples."""
    episodes = [m.episode or m.sample_id for m in members]
    sizes = Counter(episodes)
    weights = np.array([1.0 / sizes[e] for e in episodes], dtype=np.float64)
    return weights / len(sizes) if sizes else weights


def centered(values: NDArray[np.float64], weights: NDArray[np.float64], epsilon: float | None) -> NDArray[np.float64]:
    """Return values [n] minus their weighted mean, divided by their weighted standard deviation plus `epsilon` if it is given."""
    from_first = values - values[:1]  # equal values become exactly 0, whatever their size
    centered = from_first - weights @ from_first
    return centered if epsilon is None else centered / (np.sqrt(weights @ np.square(centered)) + epsilon)


def spread_over_samples(
    scalars: Mapping[str, Mapping[str, float]], samples: Sequence[TrainingSample]
) -> list[SegmentAdvantages | None]:
    """Give each sample its scalar on all its segments. `scalars`: group -> sample id -> advantage."""
    return [_spread(scalars, sample) for sample in samples]


def _spread(scalars: Mapping[str, Mapping[str, float]], sample: TrainingSample) -> SegmentAdvantages | None:
    sample_id = sample.sample.sample_id
    if sample.group not in scalars:
        raise ValueError(f"sample {sample_id} is of group {sample.group!r}, whose context is missing")
    value = scalars[sample.group].get(sample_id)
    if value is None:
        return None
    return tuple(np.asarray(value, dtype=np.float32) for _ in sample.segments)


def check_membership(groups: Sequence[GroupContext], samples: Sequence[TrainingSample]) -> None:
    """Raise ValueError for a sample that the context of its group does not list, because its baseline would miss its own reward."""
    members = {g.group: {m.sample_id for m in g.members} for g in groups}
    for sample in samples:
        if sample.group in members and sample.sample.sample_id not in members[sample.group]:
            raise ValueError(f"group {sample.group!r} does not list sample {sample.sample.sample_id}")
