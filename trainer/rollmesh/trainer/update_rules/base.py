"""Update rules: how a batch is cut into optimizer steps, in which order, and with which factor of the learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.registry import Registry
from rollmesh.shared.trajectory import FloatArray
from rollmesh.trainer.batch import UpdateBatch

UPDATE_RULES = Registry(
    "update rule",
    {
        "minibatches": "rollmesh.trainer.update_rules.minibatches:Minibatches",
        "ess_minibatches": "rollmesh.trainer.update_rules.ess_minibatches:EssMinibatches",
        "turn_by_turn": "rollmesh.trainer.update_rules.turn_by_turn:TurnByTurn",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """One optimizer step."""

    samples: Sequence[int]
    """Numbers of its samples."""
    tokens: NDArray[np.bool_] | None = None
    """[M], the tokens of the batch that it trains; None means all tokens of its samples."""
    lr_factor: float = 1.0
    """Factor of the learning rate of the update."""
    refresh: bool = False
    """Compute the features under `start` and the advantages again before the step, under the weights of this moment. A step without
    samples only does this, so that the rule sees the new columns."""
    advantage_factors: FloatArray | None = None
    """[M] factors of the advantages of the batch; None means 1."""


class UpdateRule(Protocol):
    """A plan of optimizer steps. Constructed as `cls(options=...)`, or as `cls()` if the class has no `Options`.

    Optional attributes: `needs`, `features`, `needs_behavior`, and `state()` with `load_state(state)`, as for estimators; `keeps_groups`,
    True if every step has all samples of its groups, which a loss term with `whole_groups` requires.
    """

    def steps(self, batch: UpdateBatch, rng: np.random.Generator) -> Iterator[OptimizerStep]:
        """Yield the steps. `batch` has the columns `advantages` and what the rule needs; after a refresh it has the new ones. `rng` is
        a function of the run's seed and the update, and the only source of chance."""
        ...
