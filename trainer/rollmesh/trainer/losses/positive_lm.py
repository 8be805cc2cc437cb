"""Language-model loss on the positive examples of the batch, as in VAPO.

Yue et al. 2025 (arXiv:2504.05118), section 4.3, after self-imitation learning (arXiv:1806.05635). With T the samples
whose answer is right:

    loss = - log pi, averaged over all tokens of the samples in T

Right answers are rare on hard prompts, and this term uses them for more than the sign of an advantage. The estimator
`gae` marks their tokens in the column `positive`, which is 0 while only its critic is trained. The weight of the term
is its coefficient, 0.1 in the paper. The average is over the positive tokens of an optimizer step, with the token
weights of `learner.normalization`; there is no loss without one. Deviation: none known.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats


class PositiveLm(LossTerm):
    """The term. It has no options."""

    needs = ("positive",)
    needs_behavior = False
    where = "policy"

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return [M] the token weights of the positive tokens, with the sum of all token weights."""
        weight = columns["token_weight"]
        chosen = weight * columns["positive"].to(weight.dtype)
        total = chosen.sum()
        return {"positive_lm_weight": chosen * (weight.sum() / total) if total > 0 else chosen}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `positive`."""
        return -(inputs["positive_lm_weight"] * inputs.logprobs).sum(), {"positive": inputs["positive"]}
