"""Random minibatches of samples, or of whole groups, for one or several epochs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from rollmesh.shared.config.settings import PositiveInt, Settings
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.update_rules.base import OptimizerStep, UpdateRule


class MinibatchesOptions(Settings):
    """Options of the rule `minibatches`."""

    num_minibatches: PositiveInt = 2
    """Optimizer steps per epoch, each on a random part of the samples. More: faster, and further off-policy."""
    epochs: PositiveInt = 1
    """Passes over the batch. All of them are one update, so every sample is used by one update only."""
    whole_groups: bool = False
    """Keep the samples of a group in one optimizer step, for a loss that compares them. A step then has a random part
    of the groups."""


class Minibatches(UpdateRule):
    """Random minibatches, for one or several epochs."""

    Options: ClassVar[type[Settings]] = MinibatchesOptions
    needs_behavior = False

    def __init__(self, *, options: MinibatchesOptions) -> None:
        self.options = options

    @property
    def keeps_groups(self) -> bool:
        return self.options.whole_groups or self.options.num_minibatches == 1

    def steps(self, batch: UpdateBatch, rng: np.random.Generator) -> Iterator[OptimizerStep]:
        unit = batch.first(batch["group"]) if self.options.whole_groups else np.arange(len(batch.samples))
        count = len(np.unique(unit))
        for _ in range(self.options.epochs):
            order = rng.permutation(count)
            for part in np.array_split(order, min(self.options.num_minibatches, count)):
                chosen = np.flatnonzero(np.isin(unit, part)) if self.options.whole_groups else part
                yield OptimizerStep(samples=chosen.tolist())
