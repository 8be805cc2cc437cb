"""Entropy bonus: minus the entropy of the policy's distribution at each trained token.

    loss = - H(pi),   H(pi) = - sum over the vocabulary of pi log pi, in nats

Williams & Peng 1991; A3C (arXiv:1602.01783). The distribution is that at the sampling temperature, over the whole
vocabulary. The entropy has its gradient, so a micro-batch keeps its logits for the backward. The weight of the term is
its coefficient.
"""

from __future__ import annotations

from torch import Tensor

from rollmesh.trainer.features import FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.vocabulary_features import Entropy


class EntropyBonus(LossTerm):
    """The bonus. It has no options."""

    needs = ()
    needs_behavior = False
    features = {"entropy_bonus": FeatureRequest(Entropy(), "current", grad=True)}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss; `report_entropy` reports the entropy itself."""
        return -(inputs["token_weight"] * inputs["entropy_bonus"]).sum(), {}
