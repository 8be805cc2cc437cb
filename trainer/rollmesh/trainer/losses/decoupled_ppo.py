"""Decoupled PPO: the clip is around the proximal policy, the data are corrected to it by an importance weight.

Hilton et al. 2021 (arXiv:2110.00641), used for asynchronous LLM training by AReaL (arXiv:2505.24298):

    r = pi / prox,   w = prox / mu
    loss = - sg[correct(w)] * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

prox is the policy before the update's first optimizer step, so stale data do not use up the trust region.
correct(w) is min(w, weight_max), or with `over_max: mask` w where w <= weight_max and 0 elsewhere (AReaL's cap). Nothing
here pulls back towards mu: at large staleness the policy can drift freely.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import torch
from torch import Tensor

from rollmesh.trainer.losses.base import LossInputs, TokenStats
from rollmesh.trainer.losses.ppo_clip import clipped_objective
from rollmesh.trainer.losses.ratio import out_of_range, safe_ratio


class DecoupledPpoConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="decoupled_ppo", tag_field="name"
):
    """Clip bounds around the proximal policy, and the cap of the importance weight."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    weight_max: float = 2.0
    """Cap of prox / mu. Higher: less bias, more variance."""
    over_max: Literal["truncate", "mask"] = "truncate"
    """What happens to a token above the cap: it counts with the cap, or not at all."""

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"clip_low = {self.clip_low}: must be between 0 and 1")
        if self.clip_high <= 0:
            raise ValueError(f"clip_high = {self.clip_high}: must be positive")
        if self.weight_max < 1:
            raise ValueError(f"weight_max = {self.weight_max}: must be at least 1, the weight of on-policy data")


class DecoupledPpo:
    """`decoupled_ppo_loss` with its config bound."""

    needs = ("proximal",)

    def __init__(self, config: DecoupledPpoConfig) -> None:
        self.config = config

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        return decoupled_ppo_loss(inputs, self.config)


def decoupled_ppo_loss(inputs: LossInputs, config: DecoupledPpoConfig) -> tuple[Tensor, TokenStats]:
    """Scalar loss, and per token `clipped`, `clipped_high` and `weight_capped`."""
    weight = safe_ratio(inputs["proximal"], inputs["behavior"]).detach()
    over = weight > config.weight_max
    replacement = config.weight_max if config.over_max == "truncate" else 0.0
    weight = torch.where(over, torch.full_like(weight, replacement), weight)
    ratio = safe_ratio(inputs.logprobs, inputs["proximal"])
    held = out_of_range(inputs.logprobs, inputs["proximal"])
    objective, stats = clipped_objective(ratio, held, inputs["advantages"], config.clip_low, config.clip_high)
    return -(inputs["token_weight"] * weight * objective).sum(), {**stats, "weight_capped": over.float()}
