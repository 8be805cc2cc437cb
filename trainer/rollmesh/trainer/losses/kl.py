"""Penalty on the distance to another policy q: an estimate of KL(pi || q) at the sampled tokens.

Schulman 2020 (joschu.net/blog/kl-approx.html), with d = log pi - log q, in nats per token:

    k1 = d                       unbiased as a value; its expected gradient is 0 on data of pi, so as a loss it does not hold pi near q
    k2 = d^2 / 2                 biased as a value; on data of pi its gradient is that of KL(pi || q)
    k3 = exp(-d) - 1 + d         unbiased and never negative as a value (GRPO, arXiv:2402.03300); its gradient is that of KL(q || pi)
                                 if q is near pi

Gradients: Tang & Munos 2025 (arXiv:2506.09477). `straight_through` keeps the value and takes the gradient of k2, as the
variants of verl with a plus sign do. `corrected` multiplies the estimate by pi / mu, with gradient, so that it is
unbiased on data of mu (DeepSeek-V3.2, arXiv:2512.02556). The estimator `kl_reward` has the penalty in the reward
instead. Deviation: d is limited to +-20 to stay finite; verl also limits k3 to 10. The penalty is never weighted by an
importance weight other than `corrected`.
"""  # noqa: E501, W505

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from rollmesh.shared.config.settings import Settings
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.ratio import LOG_RATIO_MAX, safe_ratio

Kind = Literal["k1", "k2", "k3"]


class KlPenaltyOptions(Settings):
    """The estimate, and the policy q."""

    kind: Kind = "k3"
    """Estimate of the divergence."""
    to: Literal["reference", "proximal", "behavior"] = "reference"
    """The policy q: `learner.reference`, the policy at the start of the update, or the one that sampled the token."""
    straight_through: bool = False
    """Take the gradient of k2 whatever the estimate."""
    corrected: bool = False
    """Multiply by pi / mu, for data that another policy sampled."""


class KlPenalty(LossTerm):
    """The penalty with its options. The weight of the term is its coefficient."""

    Options: ClassVar[type[Settings]] = KlPenaltyOptions

    def __init__(self, *, options: KlPenaltyOptions) -> None:
        self.options = options

    @property
    def needs(self) -> tuple[str, ...]:
        return () if self.options.to == "behavior" else (self.options.to,)

    @property
    def needs_behavior(self) -> bool:
        return self.options.to == "behavior" or self.options.corrected

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `kl`."""
        log_ratio = (inputs.logprobs - inputs[self.options.to]).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
        kl = kl_estimate(log_ratio, self.options.kind)
        if self.options.straight_through:
            other = kl_estimate(log_ratio, "k2")
            kl = kl.detach() + other - other.detach()
        stats = {"kl": kl.detach()}
        if self.options.corrected:
            kl = kl * safe_ratio(inputs.logprobs, inputs["behavior"])
        return (inputs["token_weight"] * kl).sum(), stats


def kl_estimate(log_ratio: Tensor, kind: Kind) -> Tensor:
    """Return the estimate [m] of KL(pi || q) for log pi - log q [m]."""
    if kind == "k1":
        return log_ratio
    return log_ratio.square() / 2 if kind == "k2" else torch.expm1(-log_ratio) + log_ratio
