"""Truncated importance sampling: policy gradient with a capped per-token weight.

Ionides 2008; for the mismatch between sampler and trainer: Yao et al. 2025 (fengyao.notion.site/off-policy-rl):

    loss = - sg[min(pi / mu, weight_max)] * A * log pi

The weight carries no gradient, so every token has a gradient, independent of its drift. There is no trust region.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta
from torch import Tensor

from rollmesh.shared.settings import Settings
from rollmesh.trainer.losses.base import LossInputs, TokenStats
from rollmesh.trainer.losses.ratio import safe_ratio


class TisOptions(Settings):
    """The cap of the importance weight."""

    weight_max: Annotated[float, Meta(ge=1)] = 2.0
    """Cap of pi / mu. 1 ignores upward drift; a higher value gives less bias and more variance."""


class Tis:
    """`tis_loss` with its options."""

    Options: ClassVar[type[Settings]] = TisOptions
    needs: tuple[str, ...] = ()

    def __init__(self, *, options: TisOptions) -> None:
        self.options = options

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        return tis_loss(inputs, self.options)


def tis_loss(inputs: LossInputs, options: TisOptions) -> tuple[Tensor, TokenStats]:
    """Return the scalar loss, and per token `weight_capped`."""
    ratio = safe_ratio(inputs.logprobs, inputs["behavior"]).detach()
    weight = ratio.clamp(max=options.weight_max)
    loss = -(inputs["token_weight"] * weight * inputs["advantages"] * inputs.logprobs).sum()
    return loss, {"weight_capped": (ratio > options.weight_max).float()}
