"""Hold back the tokens that cost most entropy: those whose advantage and log-prob covary most (Clip-Cov and KL-Cov).

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning" (arXiv:2505.22617): the entropy falls with the
covariance of log-prob and advantage, to which a few tokens contribute most. With r = pi / mu, and means over the tokens
of an optimizer step:

    cov  = (A - mean A) (log pi - mean log pi)
    clip   loss = - min(r A, clip(r) A), and 0 for `share` of the tokens, drawn from those with cov_min < cov < cov_max that the clip spares
    kl     loss = - r A, plus coefficient * |log r| for the `share` of the tokens with the largest cov

The number of tokens is rounded down, and at least 1. Published shares are 2e-4 to 2e-3 for kl and 2e-4 for clip.
Deviations: mu is the policy that sampled the token, not the policy at the start of the update; the covariance is over
an optimizer step, where the code takes each micro-batch, and is computed before the step for one more forward; the draw
is a function of the batch alone, so that a resumed run repeats it; log r is limited to +-20.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import NonNegativeFloat, Settings
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.ppo_clip import PpoClipOptions, clipped_objective
from rollmesh.trainer.losses.ratio import out_of_range, safe_ratio


class CovarianceOptions(PpoClipOptions):
    """Options of the loss. The bounds of the ratio, `dual_clip` among them, are those of kind `clip`."""

    kind: Literal["clip", "kl"] = "kl"
    """Remove the gradient of the chosen tokens (`clip`), or penalize their change (`kl`)."""
    share: Annotated[float, Meta(gt=0, le=1)] = 2e-4
    """Share of the tokens that are chosen, at least one token."""
    coefficient: NonNegativeFloat = 1.0
    """Factor of |log r| of the chosen tokens, for `kl`."""
    cov_min: float = 1.0
    """Covariance above which a token may be drawn, for `clip`."""
    cov_max: float = 5.0
    """Covariance below which a token may be drawn, for `clip`."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.cov_min >= self.cov_max:
            raise ValueError(f"`cov_min` must be < cov_max = {self.cov_max}, got {self.cov_min}")


class Covariance(LossTerm):
    """The loss with its options."""

    Options: ClassVar[type[Settings]] = CovarianceOptions
    needs = ("current",)

    def __init__(self, *, options: CovarianceOptions) -> None:
        self.options = options

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return [M] the chosen tokens as 1, and the covariance of each token."""
        current, advantages, options = columns["current"], columns["advantages"], self.options
        value = (advantages - advantages.mean()) * (current - current.mean())
        count = max(int(options.share * len(value)), 1)
        if options.kind == "kl":
            places = value.topk(count).indices
        else:
            _, stats = self._clipped(current, columns)
            eligible = (value > options.cov_min) & (value < options.cov_max) & (stats["clipped"] == 0)
            places = eligible.nonzero().squeeze(-1)
            drawn = torch.randperm(len(places), generator=torch.Generator().manual_seed(len(value)))[:count]
            places = places[drawn.to(places.device)]
        chosen = torch.zeros_like(value).index_fill(0, places, 1.0)
        return {"covariance_chosen": chosen, "covariance_value": value}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `chosen`, `covariance`, and for `clip` `clipped` and `clipped_high`."""
        chosen = inputs["covariance_chosen"]
        stats = {"chosen": chosen, "covariance": inputs["covariance_value"]}
        if self.options.kind == "clip":
            objective, clipped = self._clipped(inputs.logprobs, inputs.columns)
            return -(inputs["token_weight"] * objective * (1 - chosen)).sum(), stats | clipped
        limit = self.options.log_ratio_max
        ratio = safe_ratio(inputs.logprobs, inputs["behavior"], limit)
        distance = (inputs.logprobs - inputs["behavior"]).clamp(-limit, limit).abs()
        losses = self.options.coefficient * chosen * distance - ratio * inputs["advantages"]
        return (inputs["token_weight"] * losses).sum(), stats

    def _clipped(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        options, behavior = self.options, columns["behavior"]
        ratio = safe_ratio(logprobs, behavior, options.log_ratio_max)
        held = out_of_range(logprobs, behavior, options.log_ratio_max)
        objective, stats = clipped_objective(
            ratio, held, columns["advantages"], options.clip_low, options.clip_high, options.dual_clip
        )
        return objective, dict(stats)
