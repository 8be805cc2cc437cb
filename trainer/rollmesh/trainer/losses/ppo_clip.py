"""Clipped surrogate against the behavior policy, with the upper bound raised ("clip-higher").

PPO (Schulman et al. 2017, arXiv:1707.06347), clip-higher from DAPO (Yu et al. 2025, arXiv:2503.14476):

    r = pi / mu
    loss = - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

mu is the policy that sampled the token, not the one at the start of the update: the clip is then a trust region
around the data, which pulls back whatever has drifted. Of the losses here it survives the largest staleness.
Deviation from DAPO: no KL term (DAPO has none either), ratios are capped in log space to stay finite.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.settings import PositiveFloat, Settings
from rollmesh.trainer.losses.base import LossInputs, TokenStats
from rollmesh.trainer.losses.ratio import out_of_range, safe_ratio


class PpoClipOptions(Settings):
    """Bounds of the probability ratio."""

    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 0.2
    """How far below 1 a ratio still gets gradient when the advantage is negative."""
    clip_high: PositiveFloat = 0.28
    """How far above 1 when it is positive. Larger than `clip_low`, so that rare tokens can grow and entropy survives."""


class PpoClip:
    """`ppo_clip_loss` with its options."""

    Options: ClassVar[type[Settings]] = PpoClipOptions
    needs: tuple[str, ...] = ()

    def __init__(self, *, options: PpoClipOptions) -> None:
        self.options = options

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        return ppo_clip_loss(inputs, self.options)


def ppo_clip_loss(inputs: LossInputs, options: PpoClipOptions) -> tuple[Tensor, TokenStats]:
    """Scalar loss, and per token whether the clip removed its gradient (`clipped`, `clipped_high`)."""
    ratio = safe_ratio(inputs.logprobs, inputs["behavior"])
    held = out_of_range(inputs.logprobs, inputs["behavior"])
    objective, stats = clipped_objective(ratio, held, inputs["advantages"], options.clip_low, options.clip_high)
    return -(inputs["token_weight"] * objective).sum(), stats


def clipped_objective(
    ratio: Tensor, held: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, TokenStats]:
    """min(r A, clip(r) A) [m], and which tokens have no gradient: clipped by it, or `held` by `safe_ratio`."""
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * advantages, bounded * advantages)
    high = (ratio > 1 + clip_high) & (advantages > 0)
    low = (ratio < 1 - clip_low) & (advantages < 0)
    return objective, {"clipped": (high | low | held).detach().float(), "clipped_high": high.detach().float()}
