"""Decoupled PPO: clip around the proximal policy, and correct the data to it by an importance weight.

Hilton et al. 2021 (arXiv:2110.00641), used for asynchronous LLM training by AReaL (arXiv:2505.24298):

    r = pi / prox,   w from prox / mu
    loss = - sg[w] * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

prox is the policy before the update's first optimizer step, so stale data do not use up the trust region.
`importance.py` defines w: by default min(prox / mu, weight_max) at each token, and with `outside: mask` 0 above
weight_max (AReaL's cap). With `ratio: geometric`, r is the ratio of the sample as in `gspo`, so that GSPO and a
correction of the sampler combine (AReaL's `importance_sampling_level: sequence`, TRL with a sampler correction). No
term keeps the policy near mu, so it can drift at large staleness. `behavior_clip_low` and `behavior_clip_high`, which
no paper has, stop a token whose pi / mu has moved far enough in the direction of its advantage:

    no gradient if pi / mu > 1 + behavior_clip_high and A > 0, or pi / mu < 1 - behavior_clip_low and A < 0

Without them, large steps on stale data lost the policy of a toy task, and with the bounds of `ppo_clip` they did not
(benchmarks/README.md).

Differences: all three libraries average over the tokens of a micro-batch or of the step, as `learner.normalization`
says; AReaL and TRL keep masked tokens in the denominator, as here, and verl removes rejected ones. Only AReaL has
geometric weights; for a geometric weight with bounds on another quantity, combine `level` with `reject_level`. verl can
divide weights by their mean over the batch, which is not implemented here.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, Settings
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.gspo import geometric_ratio
from rollmesh.trainer.losses.importance import ImportanceOptions, importance_weights
from rollmesh.trainer.losses.ppo_clip import check_dual_clip, clipped_objective
from rollmesh.trainer.losses.ratio import out_of_range, safe_ratio


class DecoupledPpoOptions(ImportanceOptions):
    """Clip bounds around the proximal policy, and bounds of the importance weight."""

    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Distance of pi / prox below 1 up to which it gets a gradient if the advantage is negative."""
    clip_high: PositiveFloat = 0.28
    """Distance of pi / prox above 1 up to which it gets a gradient if the advantage is positive."""
    ratio: Literal["token", "geometric"] = "token"
    """r is the ratio of the `token`, or the `geometric` mean of those of its sample, whose bounds are much narrower:
    see `gspo`."""
    dual_clip: NonNegativeFloat = 0.0
    """Value of pi / prox above which a token with a negative advantage gets no gradient; 0 disables it."""
    behavior_clip_low: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Distance of pi / mu below 1 beyond which a token with a negative advantage gets no gradient; 0 disables it.
    `ppo_clip` stops such a token at 0.2."""
    behavior_clip_high: NonNegativeFloat = 0.0
    """Distance of pi / mu above 1 beyond which a token with a positive advantage gets no gradient; 0 disables it.
    `ppo_clip` stops such a token at 0.28."""

    def check_fields(self) -> None:
        check_dual_clip(self.dual_clip, self.clip_high)


class DecoupledPpo(LossTerm):
    """`decoupled_ppo_loss` with its options."""

    Options: ClassVar[type[Settings]] = DecoupledPpoOptions
    needs = ("proximal",)

    def __init__(self, *, options: DecoupledPpoOptions) -> None:
        self.options = options

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        return decoupled_ppo_loss(inputs, self.options)


def decoupled_ppo_loss(inputs: LossInputs, options: DecoupledPpoOptions) -> tuple[Tensor, TokenStats]:
    """Return the scalar loss, and per token `clipped`, `clipped_high`, the statistics of the weights and, with a clip
    against mu, `behavior_clipped`."""
    weight, capped = importance_weights(inputs, inputs["proximal"], inputs["behavior"], options)
    if options.ratio == "geometric":
        ratio, held = geometric_ratio(inputs, "proximal")
    else:
        ratio = safe_ratio(inputs.logprobs, inputs["proximal"])
        held = out_of_range(inputs.logprobs, inputs["proximal"])
    low, high, dual = options.clip_low, options.clip_high, options.dual_clip
    objective, stats = clipped_objective(ratio, held, inputs["advantages"], low, high, dual)
    if options.behavior_clip_low or options.behavior_clip_high:
        moved = _moved_far(inputs, options)
        objective = torch.where(moved, objective.detach(), objective)
        stats = {**stats, "behavior_clipped": moved.to(objective.dtype)}
    return -(inputs["token_weight"] * weight * objective).sum(), {**stats, **capped}


def _moved_far(inputs: LossInputs, options: DecoupledPpoOptions) -> Tensor:
    """Return the tokens [m] whose pi / mu is beyond its bound in the direction of their advantage."""
    ratio, advantages = safe_ratio(inputs.logprobs, inputs["behavior"]).detach(), inputs["advantages"]
    low, high = options.behavior_clip_low, options.behavior_clip_high
    above = (ratio > 1 + high) & (advantages > 0) if high else torch.zeros_like(ratio, dtype=torch.bool)
    below = (ratio < 1 - low) & (advantages < 0) if low else torch.zeros_like(above)
    return above | below
