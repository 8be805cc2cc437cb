"""Divergence from the reference in the reward, with a coefficient that follows a target (Ziegler et al. 2019,
arXiv:1909.08593, section 2.2; verl `kl_ctrl.type: adaptive`, OpenRLHF `kl.target`).

    R_i <- R_i - c * sum over the trained tokens of k(d), d = log prox - log ref, then the advantages of `grpo`, as in `kl_reward`
    e    = clip(KL / target - 1, -0.2, 0.2),   c <- c (1 + e min(S / horizon, 1))          after each update of S samples

KL is the mean over samples of the mean of k(d) over their tokens. A constant coefficient fixes the price of a nat; the
divergence that results depends on rewards and lengths. Here it is fixed, and c changes by at most 0.2 S / horizon per
update. c is in the checkpoint; a further estimate of the same update does not change it. Defaults are those of verl. In
the paper the KL is that of whole samples, whose target is larger.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.trainer.estimators.base import Estimate
from rollmesh.trainer.estimators.kl_reward import KlReward, KlRewardOptions

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch

ERROR_MAX = 0.2
"""Largest absolute relative error of an update."""


class AdaptiveKlOptions(KlRewardOptions):
    """Settings of the estimator `adaptive_kl`: those of `kl_reward`, with the coefficient at the begin of the run, and
    the control."""

    target: PositiveFloat = 0.1
    """Divergence per token that is aimed at, in nats."""
    horizon: PositiveInt = 10000
    """Samples over which the coefficient changes by the relative error."""


class AdaptiveKl(KlReward):
    """See the module."""

    Options: ClassVar[type[Settings]] = AdaptiveKlOptions

    def __init__(self, *, weights: Mapping[str, float], options: AdaptiveKlOptions) -> None:
        super().__init__(weights=weights, options=options)
        self._coefficient = options.coefficient
        self._used = options.coefficient
        """Coefficient of the last batch, for further estimates of it."""

    def __call__(self, batch: UpdateBatch) -> Estimate:
        if batch.repeat == 0:
            self._used = self._coefficient
            self._coefficient *= 1.0 + self._error(batch) * min(len(batch.samples) / self.options.horizon, 1.0)
        found = super().__call__(batch)
        return replace(found, metrics={**found.metrics, "coefficient": self._used})

    def coefficient(self, batch: UpdateBatch) -> float:
        """Return the coefficient before this batch."""
        return self._used

    def state(self) -> dict[str, Any]:
        return {"coefficient": self._coefficient}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._coefficient = float(state["coefficient"])

    def _error(self, batch: UpdateBatch) -> float:
        """Return the limited relative distance of the mean divergence per token from the target."""
        mean = float((batch.sums(self.divergence(batch)) / batch.lengths).mean())
        return float(np.clip(mean / self.options.target - 1.0, -ERROR_MAX, ERROR_MAX))
