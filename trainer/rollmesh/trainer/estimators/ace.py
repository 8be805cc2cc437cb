"""GRPO with a stronger penalty for errors that training has made likelier (ACE, 2026-02, arXiv:2602.21420).

    c_i = log pi(y_i | x) - log pi_ref(y_i | x)           confidence shift of sample i, in nats
    A_i <- A_i (1 + strength f(c_i))   where A_i < 0      positive advantages are those of `grpo`, bit for bit

f grows from 0 for samples that are much less likely than under the reference, so that errors which the policy already
corrects keep their penalty, and errors that it has reinforced get a larger one. pi is the policy at the start of the
update, pi_ref is `learner.reference`, and both are at the sampling temperature, over the trained tokens of the sample.

The abstract does not state f. Descriptions of the paper name the softplus, log(1 + exp(c)), and compare it with max(c,
0); both are options here. `strength`, the limit of c and the choice between the sum over the tokens and their mean are
our own. A sum over hundreds of tokens is often beyond the limit, which is why a run with long samples may want `shift:
mean`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.trainer.estimators.base import Estimate
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:
    from rollmesh.trainer.batch import UpdateBatch


class AceOptions(GrpoOptions):
    """Settings of the estimator `ace`: those of `grpo`, and the factor of negative advantages."""

    modulation: Literal["softplus", "relu"] = "softplus"
    """The function f of the confidence shift."""
    strength: PositiveFloat = 1.0
    """Factor of f."""
    shift: Literal["sum", "mean"] = "sum"
    """Whether the shift of a sample is the sum over its trained tokens, as in the paper, or their mean."""
    shift_max: PositiveFloat = 20.0
    """Limit of the absolute shift, in nats."""


class Ace(Grpo):
    """Multiply negative advantages by a factor that grows with the confidence shift."""

    Options: ClassVar[type[Settings]] = AceOptions
    needs = ("proximal", "reference")

    def __call__(self, batch: UpdateBatch) -> Estimate:
        options: AceOptions = self.options
        base = super().__call__(batch)
        shift = batch.sums(batch["proximal"].astype(np.float64) - batch["reference"])
        if options.shift == "mean":
            shift = shift / batch.lengths
        factor = ace_factor(shift, options)
        advantages = np.where(base.advantages < 0, base.advantages * batch.per_token(factor), base.advantages)
        wrong = batch.first(base.advantages) < 0
        metrics = {
            **base.metrics,
            "shift_mean": float(shift.mean()),
            "factor_mean": float(factor[wrong].mean()) if wrong.any() else 1.0,
        }
        return Estimate(advantages=advantages.astype(np.float32), dropped=base.dropped, metrics=metrics)


def ace_factor(shift: NDArray[np.float64], options: AceOptions) -> NDArray[np.float64]:
    """Return the factor [S] of the negative advantages of samples with these confidence shifts [S]."""
    limited = np.clip(shift, -options.shift_max, options.shift_max)
    grown = np.logaddexp(0.0, limited) if options.modulation == "softplus" else np.maximum(limited, 0.0)
    factor: NDArray[np.float64] = 1.0 + options.strength * grown
    return factor
