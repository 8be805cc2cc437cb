"""Clipped surrogate against the behavior policy, with the upper bound raised ("clip-higher").

PPO (Schulman et al. 2017, arXiv:1707.06347), clip-higher from DAPO (Yu et al. 2025, arXiv:2503.14476):

    r = pi / mu
    loss = - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

`dual_clip` c also bounds the loss of a bad token whose ratio has grown (Ye et al. 2020, arXiv:1912.09729): for A < 0,

    loss = - max(min(r A, clip(r) A), c A)

which equals the two-sided clip of TRL (`delta`) and the dual clip of verl and AReaL (`clip_ratio_c`, `c_clip`).
`log_ratio_max` limits log r before the exponential (pre-clip of StableReinforce, arXiv:2505.02835).

mu is the policy that sampled the token, not the policy at the start of the update. So the clip is a trust region around
the data, which limits drift. Of the losses here it tolerates the largest staleness. As in DAPO there is no KL term.
Deviations: ratios are always limited in log space to stay finite; `decoupled_ppo` clips around the policy at the start
of the update, as PPO does.
"""

from __future__ import annotations

from math import log
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, Settings
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.ratio import LOG_RATIO_MAX, out_of_range, safe_ratio


class PpoClipOptions(Settings):
    """Bounds of the probability ratio."""

    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """Distance below 1 up to which a ratio gets a gradient if the advantage is negative."""
    clip_high: PositiveFloat = 0.28
    """Distance above 1 if it is positive. Larger than `clip_low`, so that rare tokens can grow and entropy does not
    collapse."""
    dual_clip: NonNegativeFloat = 0.0
    """Ratio above which a token with a negative advantage gets no gradient; 0 disables it. Usual: 3 (verl), 10."""

    log_ratio_max: Annotated[float, Meta(gt=0, le=LOG_RATIO_MAX)] = LOG_RATIO_MAX
    """Largest absolute log-ratio. A token beyond it gets no gradient; its loss is that of the limit. StableReinforce:
    log 1000 = 6.9."""

    def check_fields(self) -> None:
        check_dual_clip(self.dual_clip, self.clip_high)
        least = max(log(1 + self.clip_high), -log(1 - self.clip_low))
        if self.log_ratio_max <= least:
            raise ValueError(f"`log_ratio_max` must be > {least:.4f}, which the clip reaches, got {self.log_ratio_max}")


class PpoClip(LossTerm):
    """`ppo_clip_loss` with its options."""

    Options: ClassVar[type[Settings]] = PpoClipOptions
    needs = ()

    def __init__(self, *, options: PpoClipOptions) -> None:
        self.options = options

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        return ppo_clip_loss(inputs, self.options)


def ppo_clip_loss(inputs: LossInputs, options: PpoClipOptions) -> tuple[Tensor, TokenStats]:
    """Return the scalar loss, and per token whether the clip removed its gradient (`clipped`, `clipped_high`)."""
    ratio = safe_ratio(inputs.logprobs, inputs["behavior"], options.log_ratio_max)
    held = out_of_range(inputs.logprobs, inputs["behavior"], options.log_ratio_max)
    low, high, dual = options.clip_low, options.clip_high, options.dual_clip
    objective, stats = clipped_objective(ratio, held, inputs["advantages"], low, high, dual)
    return -(inputs["token_weight"] * objective).sum(), stats


def check_dual_clip(dual_clip: float, clip_high: float) -> None:
    """Raise ValueError for a bound that would cut into the range of the clip."""
    if dual_clip and dual_clip <= 1 + clip_high:
        raise ValueError(f"`dual_clip` must be 0 or > 1 + clip_high = {1 + clip_high}, got {dual_clip}")


def clipped_objective(
    ratio: Tensor, held: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, TokenStats]:
    """Return min(r A, clip(r) A) [m], and which tokens have no gradient: clipped tokens, and those `held` by
    `safe_ratio`."""
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, bounded * advantages)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    low = (ratio < 1 - clip_low) & (advantages < 0)
    if dual_clip:
        held = held | ((advantages < 0) & (ratio > dual_clip))
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    return objective, {"clipped": (high | low | held).detach().float(), "clipped_high": high.detach().float()}
