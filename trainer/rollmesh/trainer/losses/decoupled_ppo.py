"""Decoupled PPO: clip around the proximal policy, and correct the data to it by an importance weight.

Hilton et al. 2021 (arXiv:2110.00641), used for asynchronous LLM training by AReaL (arXiv:2505.24298):

    r = pi / prox,   w = prox / mu
    loss = - sg[correct(w)] * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

prox is the policy before the update's first optimizer step, so stale data do not use up the trust region.
correct(w) is min(w, weight_max), or with `over_max: mask` w where w <= weight_max and 0 elsewhere (AReaL's cap). No term keeps the
policy near mu, so it can drift at large staleness.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.settings import PositiveFloat, Settings
from rollmesh.trainer.losses.base import LossInputs, TokenStats
from rollmesh.trainer.losses.ppo_clip import clipped_objective
from rollmesh.trainer.losses.ratio import out_of_range, safe_ratio


class DecoupledPpoOptions(Settings):
    """Clip bounds around the proximal policy, and the cap of the importance weight."""

    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Distance of pi / prox below 1 up to which it gets a gradient if the advantage is negative."""
    clip_high: PositiveFloat = 0.28
    """Distance of pi / prox above 1 up to which it gets a gradient if the advantage is positive."""
    weight_max: Annotated[float, Meta(ge=1)] = 2.0
    """Cap of prox / mu. A higher value gives less bias and more variance."""
    over_max: Literal["truncate", "mask"] = "truncate"
    """A token above the cap has the weight of the cap (`truncate`) or 0 (`mask`)."""


class DecoupledPpo:
    """`decoupled_ppo_loss` with its options."""

    Options: ClassVar[type[Settings]] = DecoupledPpoOptions
    needs = ("proximal",)

    def __init__(self, *, options: DecoupledPpoOptions) -> None:
        self.options = options

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        return decoupled_ppo_loss(inputs, self.options)


def decoupled_ppo_loss(inputs: LossInputs, options: DecoupledPpoOptions) -> tuple[Tensor, TokenStats]:
    """Return the scalar loss, and per token `clipped`, `clipped_high` and `weight_capped`."""
    weight = safe_ratio(inputs["proximal"], inputs["behavior"]).detach()
    over = weight > options.weight_max
    replacement = options.weight_max if options.over_max == "truncate" else 0.0
    weight = torch.where(over, torch.full_like(weight, replacement), weight)
    ratio = safe_ratio(inputs.logprobs, inputs["proximal"])
    held = out_of_range(inputs.logprobs, inputs["proximal"])
    objective, stats = clipped_objective(ratio, held, inputs["advantages"], options.clip_low, options.clip_high)
    return -(inputs["token_weight"] * weight * objective).sum(), {**stats, "weight_capped": over.float()}
