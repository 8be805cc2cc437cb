"""Lp-Reg: protect unlikely tokens from being eliminated, unless they are noise.

Low-probability Regularization (2025-10, arXiv:2510.03222; code: CarlanLark/Lp-Reg-dev). The proxy is the policy without
its unlikely tokens, renormalized (`kept_logprob`): tokens with a probability below `threshold` times that of the most
likely one (`relative`, min-p), or below `threshold` (`fixed`). So it gives more probability to all tokens that are not
noise. A token is protected if A < 0, it is among the `share` of the tokens with A < 0 of the optimizer step that have
the lowest log-prob, and pi < proxy:

    loss of a protected token = - r A + beta * (exp(d) - 1 - d),   d = log proxy - log pi;   r = pi / mu
    loss of other tokens      = - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

The penalty is the estimate k3 of KL(pi || proxy). Its gradient by log pi is beta * (1 - proxy / pi) < 0, so it raises
the token. The proxy has no gradient. A token below the threshold has no probability under the proxy, and no protection.

Deviations: the lowest tokens are those of a whole optimizer step, where the code takes those of a micro-batch, and
their number is rounded down; the code protects none if that is 1. r is against the policy that sampled the token, as in
`ppo_clip`. `proxy: start` is the policy at the start of the update, as in the scripts of the code. Costs one more
forward per update and one per optimizer step; `proxy: step` only the latter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, Settings
from rollmesh.trainer.features import FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.kl import kl_estimate
from rollmesh.trainer.losses.ppo_clip import clipped_objective
from rollmesh.trainer.losses.ratio import LOG_RATIO_MAX, out_of_range, safe_ratio
from rollmesh.trainer.vocabulary_features import KeptLogprob, KeptOptions


class LpRegOptions(Settings):
    """Options of Lp-Reg; the defaults are those of the code."""

    threshold: Annotated[float, Meta(ge=0, lt=1)] = 0.02
    """Probability below which a token is noise; with `relative`, as a share of the largest one."""
    kind: Literal["fixed", "relative"] = "relative"
    """Kind of the threshold."""
    share: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """Share of the tokens with a negative advantage that may be protected."""
    beta: NonNegativeFloat = 1.0
    """Coefficient of the divergence."""
    proxy: Literal["start", "step"] = "start"
    """Weights of the proxy: the policy at the start of the update, or before the optimizer step."""
    clip_low: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Distance below 1 up to which a ratio gets a gradient if the advantage is negative."""
    clip_high: PositiveFloat = 9.0
    """Distance above 1 if it is positive."""


class LpReg(LossTerm):
    """The loss with its options."""

    Options: ClassVar[type[Settings]] = LpRegOptions
    features: Mapping[str, FeatureRequest]
    needs = ("current",)

    def __init__(self, *, options: LpRegOptions) -> None:
        self.options = options
        kept = KeptLogprob(options=KeptOptions(threshold=options.threshold, kind=options.kind))
        self.features = {"lp_reg_proxy": FeatureRequest(kept, options.proxy)}

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return [M] whether the token is among the least likely ones with a negative advantage."""
        return {"lp_reg_lowest": lowest(columns["current"], columns["advantages"] < 0, self.options.share)}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `clipped`, `clipped_high` and `protected`."""
        options, logprobs, advantages = self.options, inputs.logprobs, inputs["advantages"]
        ratio = safe_ratio(logprobs, inputs["behavior"])
        held = out_of_range(logprobs, inputs["behavior"])
        objective, stats = clipped_objective(ratio, held, advantages, options.clip_low, options.clip_high)
        protected = inputs["lp_reg_lowest"] & (logprobs.detach() < inputs["lp_reg_proxy"])
        # Other tokens take their own log-prob, because a masked infinite proxy would still make their gradient NaN.
        proxy = torch.where(protected, inputs["lp_reg_proxy"], logprobs.detach())
        divergence = kl_estimate((logprobs - proxy).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX), "k3")
        loss = torch.where(protected, options.beta * divergence - ratio * advantages, -objective)
        return (inputs["token_weight"] * loss).sum(), {**stats, "protected": protected.to(loss.dtype)}


def lowest(values: Tensor, among: Tensor, share: float) -> Tensor:
    """Return [M]: True for the lowest `share` of the values [M] where `among` [M] is True, rounded down. Of equal ones
    the first."""
    chosen = torch.zeros_like(among)
    places = among.nonzero().squeeze(-1)
    order = values[places].argsort(stable=True)
    chosen[places[order[: int(share * len(places))]]] = True
    return chosen
