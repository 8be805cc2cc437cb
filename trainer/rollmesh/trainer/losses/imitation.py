"""Imitation: the negative log-likelihood of given tokens, such as those of a solution that another model or a person
wrote.

    loss = - log pi,   averaged over the tokens of the term, in nats per token

Supervised fine-tuning as a loss term, so that a recipe can sum it with others. By default its tokens are the external
ones (`where`). Log-probs are at temperature 1, because external tokens were not sampled. The weight of a sample scales
its tokens, so an estimator can weigh solutions (`red`). The weight of the term is its coefficient. Averages are those
of `learner.normalization`, over these tokens alone.
"""

from __future__ import annotations

from torch import Tensor

from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats


class Imitation(LossTerm):
    """The term. It has no options."""

    needs = ()
    needs_behavior = False
    where = "external"

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `imitation_nll`, its negative log-likelihood."""
        loss = -(inputs["token_weight"] * inputs.logprobs).sum()
        return loss, {"imitation_nll": -inputs.logprobs.detach()}
