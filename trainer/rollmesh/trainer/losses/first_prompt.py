"""Train an answer as an answer to another prompt than the one it was sampled after.

RLTF-SD (2026-02, arXiv:2602.02482):  loss = - A log pi(y1 | x0)

y1 was sampled after x0, a first answer and a critique. The log-prob is that of the column `first_prompt`: a feature
`other_prompt_logprob` with gradient, under the current weights, which omits what is between. There is no importance
weight.
"""

from __future__ import annotations

from torch import Tensor

from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats


class FirstPromptGradient(LossTerm):
    """The term. It has no options."""

    needs = ("first_prompt",)
    needs_behavior = False

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `first_prompt_logprob`."""
        logprobs = inputs["first_prompt"]
        loss = -(inputs["token_weight"] * inputs["advantages"] * logprobs).sum()
        return loss, {"first_prompt_logprob": logprobs.detach()}
