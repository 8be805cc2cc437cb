"""GRPO with a bonus for answers whose hidden states spread more than usual (Velocity-Exploiting Rank Learning, VERL,
2025-09, arXiv:2509.23808; code: hf618/VERL).

With ER_i the effective rank of the last hidden states of answer i, ERV_i the mean over its strides of the change of the
effective rank (velocity), and ERA_i the mean of the change of that (acceleration), see `hidden_features.EffectiveRank`:

    d(x)  = clip((x - EMA x) / |EMA x|, -5, 5)                              deviation from a moving average over updates
    g     = sigmoid(gain * d(ERA))                                          1: explore, 0: exploit
    Phi   = weight * (g * tanh d(ER) + (1 - g) * tanh d(ERV))
    A     = A0 + min(max(Phi, 0), |A0| / kappa)                             A0 is the advantage of `grpo`

The shaping never changes the sign of an advantage, because kappa > 1. After an update, EMA x <- (1 - share) EMA x +
share * mean of x over its samples; the averages are in the checkpoint. The ranks are under the policy at the start of
the update.

Deviations: the code adds the bonus to the last token of an answer alone, which `tokens: last` does; the paper's formula
has it at all tokens. The code begins with averages of 0 and an update late; here the averages begin with the means of
the first update, which has no bonus. Answers of fewer than three strides have no acceleration: they have no bonus and
do not count in the averages, where the code counts
0. The states are those from which the tokens are predicted, and the strides of the code have one more token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Settings
from rollmesh.trainer.estimators.base import Estimate
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:  # they import torch
    from rollmesh.trainer.batch import UpdateBatch
    from rollmesh.trainer.features import FeatureRequest

RANKS = "verl_rank_ranks"
NAMES = ("rank", "velocity", "acceleration")


class VerlRankOptions(GrpoOptions):
    """Settings of the estimator `verl_rank`: those of `grpo`, and the shaping."""

    stride: PositiveInt = 40
    """Trained tokens between two effective ranks. An answer needs three strides for a bonus."""
    gain: PositiveFloat = 2.0
    """Slope of the gate between exploration and exploitation."""
    share: Annotated[float, Meta(gt=0, le=1)] = 0.3
    """Weight of the newest update in the moving averages."""
    deviation_max: PositiveFloat = 5.0
    """Largest absolute deviation from a moving average."""
    weight: NonNegativeFloat = 1.0
    """Factor of the bonus."""
    kappa: Annotated[float, Meta(gt=1)] = 2.0
    """The bonus is at most |A| / kappa."""
    tokens: Literal["all", "last"] = "all"
    """Tokens of an answer that get the bonus."""


class VerlRank(Grpo):
    """Add a bonus from effective ranks to the advantages."""

    Options: ClassVar[type[Settings]] = VerlRankOptions
    needs = (RANKS,)

    def __init__(self, *, weights: Mapping[str, float], options: VerlRankOptions) -> None:
        super().__init__(weights=weights, options=options)
        self._averages: tuple[float, ...] | None = None
        """Moving averages of `NAMES`; None before the first answer of three strides."""
        self._before: tuple[float, ...] | None = None
        """The averages before the last batch, for further estimates of it."""

    @property
    def features(self) -> dict[str, FeatureRequest]:
        from rollmesh.trainer.features import FeatureRequest  # imports torch, which the reward service lacks
        from rollmesh.trainer.hidden_features import EffectiveRank, EffectiveRankOptions

        return {RANKS: FeatureRequest(EffectiveRank(options=EffectiveRankOptions(stride=self.options.stride)))}

    def __call__(self, batch: UpdateBatch) -> Estimate:
        base = super().__call__(batch)
        measured, ranked = self._measured(batch)
        means = tuple(measured[ranked].mean(0).tolist()) if ranked.any() else None
        if batch.repeat == 0:
            self._before = self._averages
            self._follow(means)
        bonus, gate = np.zeros(len(ranked)), np.full(len(ranked), 0.5)
        if self._before is not None:
            bonus, gate = bonuses(measured, self._before, self.options)
        bonus = np.where(ranked, np.maximum(bonus, 0.0), 0.0)
        added = np.minimum(batch.per_token(bonus), np.abs(base.advantages) / self.options.kappa)
        if self.options.tokens == "last":
            added[~_last_tokens(batch)] = 0.0
        metrics = {
            **base.metrics,
            "ranked_share": float(ranked.mean()),
            "gate": float(gate[ranked].mean()) if ranked.any() else 0.5,
            "bonus": float(added.mean()),
            **(dict(zip(NAMES, means, strict=True)) if means else {}),
        }
        return Estimate(advantages=(base.advantages + added).astype(np.float32), dropped=base.dropped, metrics=metrics)

    def state(self) -> dict[str, Any]:
        return {"averages": None if self._averages is None else list(self._averages)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._averages = None if state["averages"] is None else tuple(state["averages"])

    def _measured(self, batch: UpdateBatch) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return [S, 3] effective rank, velocity and acceleration of each sample, and [S] whether it has three
        strides."""
        ranks, strides = batch[RANKS].astype(np.float64), batch.lengths // self.options.stride
        ends = (place_in_sample(batch) + 1) % self.options.stride == 0
        # The first stride has the velocity 0, and the first two the acceleration 0, which are not part of the means.
        velocity = batch.sums(np.where(ends, ranks[:, 2], 0.0)) / np.maximum(strides - 1, 1)
        acceleration = batch.sums(np.where(ends, ranks[:, 3], 0.0)) / np.maximum(strides - 2, 1)
        return np.stack([batch.first(ranks[:, 0]), velocity, acceleration], axis=1), strides >= 3

    def _follow(self, means: tuple[float, ...] | None) -> None:
        """Move the averages towards the means of a batch."""
        if means is not None:
            share, old = self.options.share, self._averages or means
            self._averages = tuple((1 - share) * a + share * m for a, m in zip(old, means, strict=True))


def bonuses(
    measured: NDArray[np.float64], averages: tuple[float, ...], options: VerlRankOptions
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return Phi [S] and the gate [S], given rank, velocity and acceleration [S, 3] and their moving averages."""
    center = np.array(averages)
    limit = options.deviation_max
    rank, velocity, acceleration = np.clip((measured - center) / (np.abs(center) + 1e-8), -limit, limit).T
    gate = 1.0 / (1.0 + np.exp(-options.gain * acceleration))
    return options.weight * (gate * np.tanh(rank) + (1.0 - gate) * np.tanh(velocity)), gate


def place_in_sample(batch: UpdateBatch) -> NDArray[np.int64]:
    """Return [M]: the number of each token among the trained tokens of its sample, from 0."""
    begins = np.cumsum(batch.lengths) - batch.lengths
    place: NDArray[np.int64] = np.arange(int(batch.lengths.sum())) - np.repeat(begins, batch.lengths)
    return place


def _last_tokens(batch: UpdateBatch) -> NDArray[np.bool_]:
    last = np.zeros(int(batch.lengths.sum()), dtype=bool)
    last[np.cumsum(batch.lengths) - 1] = True
    return last
