"""Minibatches after a warm-up without optimizer steps (WSRL, 2024-12, arXiv:2412.07762; code: zhouzypaul/wsrl, which
was read in the fork xingcw/wsrl_brax).

    k in (after_update, after_update + warmup_updates]:  no step, so that update k is SKIPPED
    other k:                                             the steps of `minibatches`

k is the number of the update. Why: a policy that was trained on other data meets its own rollouts, and what the learner
has estimated, such as a value function, does not fit them yet, so that the first gradients would unlearn what the
policy can do. In a warm-up the policy and the optimizer do not change, and the rollouts are those of the initial
policy. An estimator is called as in any update, so that its memory, such as the tracked pass rates of `mssr` or the
quantiles of `risk_po`, begins with fresh rollouts. `after_update` is 0 for a new run, and the step of the checkpoint
for a warm-up after a resume.

The paper collects 5000 transitions without an update, then trains actor and critic on the buffer of online data alone.
Deviations: the samples of a warm-up are not trained later, because an update trains its own batch. A replay buffer of a
loss term, such as that of `archer`, is not filled, because terms run in optimizer steps. The number of updates is not
established for language models; configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from rollmesh.shared.config.settings import NonNegativeInt, Settings
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.update_rules.base import OptimizerStep
from rollmesh.trainer.update_rules.minibatches import Minibatches, MinibatchesOptions


class WarmStartOptions(MinibatchesOptions):
    """Options of the rule `warm_start`: those of `minibatches`, and the warm-up."""

    warmup_updates: NonNegativeInt = 4
    """Number of updates without optimizer steps."""
    after_update: NonNegativeInt = 0
    """Number of the update after which the warm-up begins."""


class WarmStartRule(Minibatches):
    """Random minibatches, and none in the warm-up."""

    Options: ClassVar[type[Settings]] = WarmStartOptions

    def __init__(self, *, options: WarmStartOptions) -> None:
        super().__init__(options=options)
        self._chosen = options

    def steps(self, batch: UpdateBatch, rng: np.random.Generator) -> Iterator[OptimizerStep]:
        begin = self._chosen.after_update
        if not begin < batch.update <= begin + self._chosen.warmup_updates:
            yield from super().steps(batch, rng)
