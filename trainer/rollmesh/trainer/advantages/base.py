"""The advantage protocol, and how a reward vector is read.

Which rewards count: those about the whole sample with outcome OK. An INFRA_FAILURE says nothing about the model: such
a member is left out of every mean, and as a sample it has no advantage at all (never a zero score). NOT_APPLICABLE
leaves out that one reward of that one member.
A baseline counts episodes, not samples: a mean is taken over the samples of each episode, then over episodes.
Members that will not be trained (stale, filtered) stay in the statistics: leaving them out would bias the baseline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.trajectory import (
    WHOLE_SAMPLE,
    FloatArray,
    GroupContext,
    MemberOutcome,
    Outcome,
    TrainingSample,
)

SegmentAdvantages = tuple[FloatArray, ...]
"""One array per segment of a sample's path, each broadcastable to [tokens of the segment]."""


class AdvantageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which advantage, and its knobs."""

    name: str = "grpo"
    """`grpo`: compares weighted reward sums. `gdpo`: normalises each reward by itself, which keeps weights meaningful."""
    weights: dict[str, float] = {}
    """Reward name -> weight. Rewards not named are recorded, not optimised. Empty: every reward has weight 1. In a mesh this is
    `reward.weights`."""
    scale_by_std: bool = True
    """Divide by the group's standard deviation. False is Dr. GRPO: small differences keep their size."""
    epsilon: float = 1e-6
    """Added to standard deviations, so that groups whose members agree get 0, not a division by zero."""

    @property
    def scaling(self) -> float | None:
        """What `centered` takes."""
        return self.epsilon if self.scale_by_std else None

    def __post_init__(self) -> None:
        if self.epsilon <= 0:
            raise ValueError(f"epsilon = {self.epsilon}: must be positive")
        if not all(np.isfinite(weight) for weight in self.weights.values()):
            raise ValueError(f"weights = {self.weights}: must be finite")


class Advantage(Protocol):
    """Pure: rewards of groups in, advantages of samples out."""

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Sample id -> its advantage as far as its group alone decides it, for the members that have usable rewards.

        If all are 0, no sample of the group has anything to teach: finalizers filter such a group.
        """
        ...

    def __call__(
        self, groups: Sequence[GroupContext], samples: Sequence[TrainingSample]
    ) -> list[SegmentAdvantages | None]:
        """One entry per sample, in order; None where the sample has no usable reward.

        Raises ValueError when a sample's group is not among `groups`, or does not list the sample.
        """
        ...


def usable_rewards(member: MemberOutcome) -> dict[str, float] | None:
    """Name -> value of a member's whole-sample rewards; None if infrastructure failed it, or nothing was scored.

    A value that is not finite is a failure of the scorer.
    """
    whole = [r for r in member.rewards if r.segment == WHOLE_SAMPLE]
    if any(r.outcome is Outcome.INFRA_FAILURE or (r.outcome is Outcome.OK and not isfinite(r.value)) for r in whole):
        return None
    return {r.name: r.value for r in whole if r.outcome is Outcome.OK} or None


def weight_of(weights: Mapping[str, float], name: str) -> float:
    return weights.get(name, 0.0) if weights else 1.0


def episode_weights(members: Sequence[MemberOutcome]) -> NDArray[np.float64]:
    """Weights [n] of members in a mean: every episode counts once, shared by its samples. Their sum is 1."""
    episodes = [m.episode or m.sample_id for m in members]
    sizes = Counter(episodes)
    weights = np.array([1.0 / sizes[e] for e in episodes], dtype=np.float64)
    return weights / len(sizes) if sizes else weights


def centered(values: NDArray[np.float64], weights: NDArray[np.float64], epsilon: float | None) -> NDArray[np.float64]:
    """Values [n] minus their weighted mean, divided by their weighted standard deviation plus `epsilon`, if it is given."""
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
        raise ValueError(f"sample {sample_id} is of group {sample.group!r}, whose context was not given")
    value = scalars[sample.group].get(sample_id)
    if value is None:
        return None
    return tuple(np.asarray(value, dtype=np.float32) for _ in sample.segments)


def check_membership(groups: Sequence[GroupContext], samples: Sequence[TrainingSample]) -> None:
    """Raise ValueError for a sample that its group's context does not list: its baseline would miss its own reward."""
    members = {g.group: {m.sample_id for m in g.members} for g in groups}
    for sample in samples:
        if sample.group in members and sample.sample.sample_id not in members[sample.group]:
            raise ValueError(f"group {sample.group!r} does not list sample {sample.sample.sample_id}")
