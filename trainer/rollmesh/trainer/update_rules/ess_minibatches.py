"""Minibatches whose learning rate follows the effective sample size (VCPO, arXiv:2602.17616; code: mit-han-lab/vcpo).

    ess = (sum w)^2 / (B sum w^2),   learning rate = lr * ess ^ power

w_i is the product of pi / mu over the trained tokens of sample i, of the B samples of the minibatch. The factor is 1 if
all weights are equal, and 1 / sqrt(B) if one sample has all the weight (power 0.5). The paper derives the square root
for AdamW. The code computes w before each step, which `refresh` does and which costs one forward pass per step;
otherwise w is under the policy at the start of the update. The exponent of w is limited to +-20.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.effective_size import effective_sample_size
from rollmesh.trainer.estimators.vcpo import sequence_weights
from rollmesh.trainer.update_rules.base import OptimizerStep
from rollmesh.trainer.update_rules.minibatches import Minibatches, MinibatchesOptions


class EssMinibatchesOptions(MinibatchesOptions):
    """Options of the rule `ess_minibatches`: those of `minibatches`, and the factor of the learning rate."""

    power: PositiveFloat = 0.5
    """Power of the effective sample size."""
    refresh: bool = False
    """Compute the weights under the policy before each step, and the advantages again."""


class EssMinibatches(Minibatches):
    """Random minibatches with a factor of the learning rate."""

    Options: ClassVar[type[Settings]] = EssMinibatchesOptions
    needs = ("proximal",)
    needs_behavior = True

    def __init__(self, *, options: EssMinibatchesOptions) -> None:
        super().__init__(options=options)
        self._chosen = options

    def steps(self, batch: UpdateBatch, rng: np.random.Generator) -> Iterator[OptimizerStep]:
        options = self._chosen
        for number, step in enumerate(super().steps(batch, rng)):
            if number and options.refresh:
                yield OptimizerStep(samples=(), refresh=True)
            weights = sequence_weights(batch)[list(step.samples)]
            yield replace(step, lr_factor=effective_sample_size(weights) ** options.power)
