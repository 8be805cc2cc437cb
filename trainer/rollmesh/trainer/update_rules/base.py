"""Update rules: how a batch is cut into optimizer steps, in which order, and with which factor of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.plugin import optional_attribute, required
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.domain.trajectory import FloatArray
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.part import UpdatePart


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
    """Compute the features under `start` and the advantages again before the step, under the weights of this moment. A
    step without samples only does this, so that the rule sees the new columns."""
    advantage_factors: FloatArray | None = None
    """[M] factors of the advantages of the batch; None means 1."""


def checked_step(step: OptimizerStep, num_samples: int, num_tokens: int) -> OptimizerStep:
    """Return the step. Raises TypeError or ValueError if an update of S samples with M tokens cannot take it."""
    if not isinstance(step, OptimizerStep):
        raise TypeError(f"it yielded {type(step).__name__}, expected an OptimizerStep")
    if not (math.isfinite(step.lr_factor) and step.lr_factor >= 0):
        raise ValueError(f"`lr_factor` must be finite and >= 0, got {step.lr_factor}")
    if unknown := [n for n in step.samples if not 0 <= n < num_samples]:
        raise ValueError(
            f"`samples` must be in [0, {num_samples - 1}], the numbers of the samples of the batch, got {unknown[0]}"
        )
    for name, values in (("tokens", step.tokens), ("advantage_factors", step.advantage_factors)):
        if values is not None and np.shape(values) != (num_tokens,):
            raise ValueError(
                f"`{name}` must have shape [{num_tokens}], one entry per trained token of the batch, got "
                f"{list(np.shape(values))}"
            )
    return step


class UpdateRule(UpdatePart):
    """Base of update rules: a plan of optimizer steps. Constructed as `cls(options=...)`, or as `cls()` if the class
    has no `Options`."""

    @optional_attribute
    def keeps_groups(self) -> bool:
        """Whether every step has all samples of its groups, which a loss term with `whole_groups` requires."""
        return False

    @required
    def steps(self, batch: UpdateBatch, rng: np.random.Generator) -> Iterator[OptimizerStep]:
        """Yield the steps. `batch` has the columns `advantages` and what the rule needs; after a refresh it has the new
        ones. `rng` is a function of the run's seed and the update, and the only source of chance."""
        raise NotImplementedError


UPDATE_RULES = Registry(
    "update rule",
    {
        "minibatches": "rollmesh.trainer.update_rules.minibatches:Minibatches",
        "ess_minibatches": "rollmesh.trainer.update_rules.ess_minibatches:EssMinibatches",
        "turn_by_turn": "rollmesh.trainer.update_rules.turn_by_turn:TurnByTurn",
        "warm_start": "rollmesh.trainer.update_rules.warm_start:WarmStartRule",
    },
    UpdateRule,
)
