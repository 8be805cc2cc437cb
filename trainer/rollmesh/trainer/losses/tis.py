"""Truncated importance sampling: policy gradient with a capped per-token weight.

Ionides 2008; for the mismatch between sampler and trainer: Yao et al. 2025 (fengyao.notion.site/off-policy-rl):

    loss = - sg[min(pi / mu, weight_max)] * A * log pi

The weight carries no gradient, so every token keeps pulling, however far it has moved: no trust region.
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from rollmesh.trainer.losses.base import LossInputs, TokenStats
from rollmesh.trainer.losses.ratio import safe_ratio


class TisConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="tis", tag_field="name"):
    """The cap of the importance weight."""

    weight_max: float = 2.0
    """Cap of pi / mu. 1 ignores upward drift; higher: less bias, more variance."""

    def __post_init__(self) -> None:
        if self.weight_max < 1:
            raise ValueError(f"weight_max = {self.weight_max}: must be at least 1, the weight of on-policy data")


class Tis:
    """`tis_loss` with its config bound."""

    needs: tuple[str, ...] = ()

    def __init__(self, config: TisConfig) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        return tis_loss(inputs, self.config)


def tis_loss(inputs: LossInputs, config: TisConfig) -> tuple[Tensor, TokenStats]:
    """Scalar loss, and per token `weight_capped`."""
    ratio = safe_ratio(inputs.logprobs, inputs["behavior"]).detach()
    weight = ratio.clamp(max=config.weight_max)
    loss = -(inputs["token_weight"] * weight * inputs["advantages"] * inputs.logprobs).sum()
    return loss, {"weight_capped": (ratio > config.weight_max).float()}
