"""Turn by turn, the last turn first, each against the policy that the later turns have already changed (SeeUPO,
2026-02, arXiv:2602.06554; code: modelscope/AgentEvolver, branch seeupo).

For the turns t = T, T - 1, ..., 1: compute `proximal` under the current policy, then train the tokens of turn t of all
samples. So a turn is improved given later turns that are improved already, as in backward induction. The advantages of
sample i are multiplied by

    m_i = product over the turns u that were trained before t of clip(s_iu),   clipped again,   clip to [1 - low, 1 + high]
    s_iu = exp(mean over the tokens of turn u of (log pi after its update - log pi before it))

which is the advantage correction of heterogeneous-agent policy optimization (arXiv:2304.09870) with ratios of whole
turns. A sample without turn u has s_iu = 1. The correction is what an early turn sees of the improvement of later ones,
and its limits bound it: with steps so large that an update makes a turn a best response, limits of 0.2 miss an optimum
that full ratios reach (tests/unit/trainer/test_turn_order.py). Each turn costs one more forward pass over the batch.
The ratio of the loss must be against `proximal`, as that of `decoupled_ppo` is. Turns are those of the column `turn`,
counted from the begin of each sample.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.update_rules.base import OptimizerStep, UpdateRule


class TurnByTurnOptions(Settings):
    """Options of the rule `turn_by_turn`."""

    order: Literal["reverse", "forward", "random"] = "reverse"
    """Order of the turns. Backward induction requires `reverse`."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per turn, each on a random part of the samples."""
    correction: bool = True
    """Multiply advantages by the ratios of the turns that were trained before."""
    correction_low: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """Largest distance of a ratio, and of their product, below 1."""
    correction_high: PositiveFloat = 0.2
    """Largest distance above 1."""


class TurnByTurn(UpdateRule):
    """Ordered passes over the turns."""

    Options: ClassVar[type[Settings]] = TurnByTurnOptions
    needs = ("proximal",)
    needs_behavior = False

    def __init__(self, *, options: TurnByTurnOptions) -> None:
        self.options = options

    def steps(self, batch: UpdateBatch, rng: np.random.Generator) -> Iterator[OptimizerStep]:
        factors = np.ones(len(batch.samples))
        trained: NDArray[np.bool_] | None = None
        before = batch["proximal"]
        for turn in self._order(batch, rng):
            if trained is not None:
                yield OptimizerStep(samples=(), refresh=True)
                factors = self._corrected(factors, batch, trained, before)
            before = batch["proximal"].copy()
            trained = batch["turn"] == turn
            samples = rng.permutation(np.unique(batch["sample"][trained]))
            for part in np.array_split(samples, min(self.options.num_minibatches, len(samples))):
                yield OptimizerStep(samples=part.tolist(), tokens=trained, advantage_factors=batch.per_token(factors))

    def _order(self, batch: UpdateBatch, rng: np.random.Generator) -> list[int]:
        turns = np.unique(batch["turn"])
        if self.options.order == "random":
            turns = rng.permutation(turns)
        found: list[int] = turns.tolist()
        return found[::-1] if self.options.order == "reverse" else found

    def _corrected(
        self, factors: NDArray[np.float64], batch: UpdateBatch, trained: NDArray[np.bool_], before: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        """Return the factors [S] times the ratios of the turn whose tokens were `trained`; `before` is `proximal`
        before its steps."""
        if not self.options.correction:
            return factors
        low, high = 1.0 - self.options.correction_low, 1.0 + self.options.correction_high
        total = batch.sums(np.where(trained, batch["proximal"].astype(np.float64) - before, 0.0))
        ratios = np.exp(total / np.maximum(batch.sums(trained.astype(np.float64)), 1.0))
        corrected: NDArray[np.float64] = np.clip(factors * np.clip(ratios, low, high), low, high)
        return corrected
