"""Policy gradient within a trust region of divergence (DPPO, divergence proximal policy optimization, Qi et al. 2026,
arXiv:2602.04879; code: sail-sg/Stable-RL, and verl `dppo_tv`, `dppo_kl`).

    loss = - sg[min(r, weight_max)] A log pi,   r = pi / mu, and no loss for a token outside of the region:
    tv   A > 0 and pi - mu > high,  or A <= 0 and mu - pi > low                           probabilities of the token
    kl   D > high, pi > mu and A > 0,  or D > low, pi < mu and A <= 0,   D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi))

The bound on the ratio in PPO is narrow for unlikely tokens, whose ratio changes much although the distribution hardly
does, and wide for likely ones. Here the change of the probability itself is bounded: the divergence of the two
distributions, of which only "this token" and "another token" are distinguished (the binary approximation of the paper).
Its approximation by the K likeliest tokens is not implemented. Thresholds of the authors' script: 0.15 for `tv`, 0.05
for `kl`, with a `weight_max` of 10,000; verl's code has 20 if its `clip_ratio_c` is not set.

mu is the policy that sampled the token, as in the paper. Masked tokens still count in the average. Differences: verl
adds 1e-8 inside the logarithm of D; here 1 - pi is at least 1e-8. The name has also been used for other methods.
"""  # noqa: E501, W505

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.ratio import safe_ratio

REST_MIN = 1e-8
"""Smallest probability of all other tokens, so that logarithms are finite."""


class DppoOptions(Settings):
    """The divergence, its bounds, and the largest weight."""

    divergence: Literal["tv", "kl"] = "tv"
    """Total variation, or KL(mu || pi) in nats, of the token against all others."""
    low: PositiveFloat = 0.15
    """Largest divergence at which a token that became less likely gets a gradient if its advantage is not positive."""
    high: PositiveFloat = 0.15
    """Largest divergence at which a token that became likelier gets a gradient if its advantage is positive."""
    weight_max: Annotated[float, Meta(ge=1)] = 1e4
    """Largest importance weight."""


class Dppo(LossTerm):
    """The loss with its options."""

    Options: ClassVar[type[Settings]] = DppoOptions
    needs = ()

    def __init__(self, *, options: DppoOptions) -> None:
        self.options = options

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `outside`, `divergence` and `weight_capped`."""
        current, behavior, advantages = inputs.logprobs.detach(), inputs["behavior"], inputs["advantages"]
        ratio = safe_ratio(current, behavior)
        divergence = binary_divergence(current, behavior, self.options.divergence)
        up = (advantages > 0) & (current > behavior) & (divergence > self.options.high)
        down = (advantages <= 0) & (current < behavior) & (divergence > self.options.low)
        outside = (up | down).to(ratio.dtype)
        weight = ratio.clamp(max=self.options.weight_max) * (1 - outside)
        loss = -(inputs["token_weight"] * weight * advantages * inputs.logprobs).sum()
        capped = (ratio > self.options.weight_max).to(ratio.dtype)
        return loss, {"outside": outside, "divergence": divergence, "weight_capped": capped}


def binary_divergence(current: Tensor, behavior: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    """Return the divergence [m] of two distributions over "the token" and "another token", given its log-probs [m]."""
    pi, mu = current.exp(), behavior.exp()
    if kind == "tv":
        return (pi - mu).abs()
    rest_pi, rest_mu = (1 - pi).clamp(min=REST_MIN), (1 - mu).clamp(min=REST_MIN)
    return mu * (behavior - current) + rest_mu * torch.log(rest_mu / rest_pi)
