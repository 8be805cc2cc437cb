"""Geometric-mean policy optimization: the geometric mean of clipped ratios over a sample.

Zhao et al. 2025 (arXiv:2507.20673), with n trained tokens of the sample and d = log pi - log mu:

    c    = min(d, clip(d, -clip_low, clip_high)) if A >= 0,   max(d, clip(d, -clip_low, clip_high)) if A < 0
    s    = exp(mean of c over the sample)
    loss = - s A,   as s_t = sg[s] exp(c - sg[c]) per token

One token with an extreme ratio changes s by its n-th root, and is clipped before the mean. So the bounds can be wide,
and they are in log space: 0.4 allows ratios from 0.67 to 1.49. The paper averages over samples: `learner.normalization:
sequence_mean`. With one advantage per sample, value and gradient are those of - s A; tokens may have different
advantages. Deviations: mu is the policy that sampled the token unless `to: proximal`; log s is limited to +-20.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.ratio import LOG_RATIO_MAX


class GmpoOptions(Settings):
    """Bounds of the log-ratio of a token."""

    clip_low: PositiveFloat = 0.4
    """Distance of the log-ratio below 0 up to which a token gets a gradient if the advantage is negative."""
    clip_high: PositiveFloat = 0.4
    """Distance above 0 if it is positive."""
    to: Literal["behavior", "proximal"] = "behavior"
    """The policy mu: the one that sampled the token, or the policy at the start of the update, which costs one more
    forward pass."""


class Gmpo(LossTerm):
    """The loss with its options."""

    Options: ClassVar[type[Settings]] = GmpoOptions

    def __init__(self, *, options: GmpoOptions) -> None:
        self.options = options

    @property
    def needs(self) -> tuple[str, ...]:
        return () if self.options.to == "behavior" else (self.options.to,)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `clipped` and `clipped_high`."""
        advantages = inputs["advantages"]
        log_ratio = inputs.logprobs - inputs[self.options.to]
        bounded = log_ratio.clamp(-self.options.clip_low, self.options.clip_high)
        chosen = torch.where(advantages < 0, torch.maximum(log_ratio, bounded), torch.minimum(log_ratio, bounded))
        mean = inputs.sample_means(chosen.detach())
        ratio = (chosen - chosen.detach() + mean).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
        high = (log_ratio > self.options.clip_high) & (advantages >= 0)
        low = (log_ratio < -self.options.clip_low) & (advantages < 0)
        clipped = high | low | (mean.abs() > LOG_RATIO_MAX)
        stats = {"clipped": clipped.detach().float(), "clipped_high": high.detach().float()}
        return -(inputs["token_weight"] * ratio * advantages).sum(), stats
