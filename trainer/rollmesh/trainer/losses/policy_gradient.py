"""Policy gradient with importance weights.

    loss = - sg[w] * A * log pi,   w from pi / mu

`importance.py` defines the weights. Known methods are choices of its options:

    level token, truncated above     truncated importance sampling (Ionides 2008; Yao et al. 2025, fengyao.notion.site/off-policy-rl),
                                     and CISPO (MiniMax-M1, arXiv:2506.13585), which truncates the same ratio
    level token, masked outside a band   IcePop (ringtech.notion.site/icepop)
    level sequence or geometric, with rejection   sequence-level importance sampling and rejection sampling as in verl

The weight carries no gradient, so every token with a weight has a gradient, independent of its drift. There is no trust
region. Deviation: mu is the policy that sampled the token, where CISPO has the policy at the start of the update. TRL
truncates CISPO's weight above only, verl on both sides, and both multiply a sampler correction to it.
"""  # noqa: E501, W505

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rollmesh.shared.config.settings import Settings
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.importance import ImportanceOptions, importance_weights


class PolicyGradient(LossTerm):
    """The loss with its options."""

    Options: ClassVar[type[Settings]] = ImportanceOptions
    needs = ()

    def __init__(self, *, options: ImportanceOptions) -> None:
        self.options = options

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and the statistics of the weights per token."""
        weight, stats = importance_weights(inputs, inputs.logprobs, inputs["behavior"], self.options)
        return -(inputs["token_weight"] * weight * inputs["advantages"] * inputs.logprobs).sum(), stats
