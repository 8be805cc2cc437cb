"""GRPO with a penalty for text that ends in a loop (CAMPO of MiroMind-M1, 2025-07, arXiv:2507.14683; code:
MiroMindAsia/MiroMind-M1).

    f_i = share of the tokens of the last turn that are in a loop at its end, if the turn reached its limit, else 0
    R_i <- R_i - loop_weight f_i,   then the advantages of `grpo`

A loop is a suffix of the turn that repeats exactly with some period, at least `repeats_min` times; the last repetition
may be cut. An earlier start gives a larger share, so that samples which waste less of their budget have higher rewards.
The search takes time linear in the length (Z-function of the reversed tokens).

The method also has stages, which raise the limit of the response and have clip bounds each; they are separate runs
here. Deviations: the code subtracts a constant where a loop is found, the paper and this file its share. The code takes
the longest period that repeats, this file the longest suffix. Only leased samples have tokens, so a member that is not
leased gets the mean penalty of those of its group. A group whose rewards are all equal is filtered by its rewards
alone, as in the code.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from msgspec import Meta

from rollmesh.shared.config.settings import NonNegativeFloat, Settings
from rollmesh.shared.domain.trajectory import FinishReason, TrainingSample
from rollmesh.trainer.estimators.base import Estimate, adjusted_sums
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions
from rollmesh.trainer.estimators.truncation import last_loop, last_turn

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class CampoOptions(GrpoOptions):
    """Settings of the estimator `campo`: those of `grpo`, and the penalty of loops."""

    loop_weight: NonNegativeFloat = 1.0
    """Reward that a turn loses which is one loop from its begin to its end."""
    repeats_min: Annotated[int, Meta(ge=2)] = 2
    """Least number of exact repetitions of a loop."""
    only_truncated: bool = True
    """Look for loops only in turns that reached their limit of tokens."""


class Campo(Grpo):
    """Subtract the share of the loop from the reward."""

    Options: ClassVar[type[Settings]] = CampoOptions

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: CampoOptions = self.options
        shares = np.array([loop_of(sample, options) for sample in batch.samples])
        found = self.spread(
            batch, self.of_sums(adjusted_sums(batch, self.weights, -options.loop_weight * shares), self.given(batch))
        )
        metrics = {"loops": float((shares > 0).mean()), "loop_share_mean": float(shares.mean())}
        return replace(found, metrics={**found.metrics, **metrics})


def loop_of(sample: TrainingSample, options: CampoOptions) -> float:
    """Return the share of the last turn that is a loop; 0 if it did not reach its limit and `only_truncated` is set."""
    turn = last_turn(sample)
    if options.only_truncated and not (turn and turn[-1].finish is FinishReason.LENGTH):
        return 0.0
    return last_loop(sample, options.repeats_min)
