"""RL-PLUS: learn from own samples and from a given solution in one surrogate (2025, arXiv:2508.00222; code:
YihongDong/RL-PLUS).

    token that the policy sampled   loss = - r A                                    r = pi / mu
    external token                  loss = - r_m A sg[(1 - pi) ^ gamma]             r_m = 2 pi / (old + omega),   omega = (old + 1) / 2

old is the policy at the start of the update. r_m is the ratio of multiple importance sampling: the unknown author of
the solution is modelled as a mixture, one half of it the old policy and one half a policy that is certain of the token.
So r_m is at most 4, however unlikely the token was, and needs no log-prob of the author. The factor (1 - pi) ^ gamma
makes tokens that are right and unlikely count most; a token of probability 1 has none. A is the advantage against the
mean of the group's own samples (estimator `grpo` with `baseline: policy`). There is no clip, as in the published
script; `clip_low` and `clip_high` add one to own tokens.

Deviations: mu is the policy that sampled the token, not the policy at the start of the update. All tokens of an
optimizer step share one average (`learner.normalization`), where the code divides their sum by the longest possible
response. The published script does not divide advantages by the standard deviation, as the paper does, and adds an
entropy bonus of 0.001 (term `entropy`).
"""  # noqa: E501, W505

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import NonNegativeFloat, Settings
from rollmesh.shared.domain.trajectory import Source
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.ratio import safe_ratio


class RlPlusOptions(Settings):
    """Options of RL-PLUS."""

    gamma: NonNegativeFloat = 0.5
    """Power of 1 - pi in the advantage of external tokens. 0 treats likely and unlikely tokens alike."""
    clip_low: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Distance of the ratio of an own token below 1 up to which it gets a gradient if the advantage is negative; 0 does
    not clip."""
    clip_high: NonNegativeFloat = 0.0
    """Distance above 1 if it is positive; 0 does not clip."""


class RlPlus(LossTerm):
    """The loss with its options."""

    Options: ClassVar[type[Settings]] = RlPlusOptions
    needs = ("proximal",)
    needs_behavior = False

    def __init__(self, *, options: RlPlusOptions) -> None:
        self.options = options

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `external_ratio` and `exploration`, the factor of the advantage; 0 at
        own tokens."""
        external = inputs["source"] != int(Source.POLICY)
        pi, old = inputs.logprobs.exp(), inputs["proximal"].exp()
        mixed = 2 * pi / (old + (old + 1) / 2)
        exploration = (1 - pi.detach()).clamp(min=0) ** self.options.gamma
        own = self._own(inputs, external)
        objective = torch.where(external, mixed * exploration * inputs["advantages"], own)
        stats = {"external_ratio": mixed.detach() * external, "exploration": exploration * external}
        return -(inputs["token_weight"] * objective).sum(), stats

    def _own(self, inputs: LossInputs, external: Tensor) -> Tensor:
        """Return the objective of own tokens [m]; external tokens, whose behavior log-prob is NaN, have the ratio 1."""
        behavior = torch.where(external, inputs.logprobs.detach(), inputs["behavior"])
        ratio, advantages = safe_ratio(inputs.logprobs, behavior), inputs["advantages"]
        low = 1 - self.options.clip_low if self.options.clip_low else None
        high = 1 + self.options.clip_high if self.options.clip_high else None
        if low is None and high is None:
            return ratio * advantages
        return torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
