"""Policy gradient whose importance weight depends on the sign of the advantage (TOPR, Le Roux et al. 2025,
arXiv:2503.14286).

    loss = - sg[w] A log pi,   w = r limited to [positive_min, positive_max] if A >= 0, to [negative_min, negative_max] if A < 0

r is pi / mu of the whole sample (`level: sequence`, as in the paper). By default w is 1 for a positive example, which
is imitated however old it is, and min(r, 1) for a negative one, so that an error that the policy no longer makes is not
pushed further down. So the objective is bounded without a KL term or a clip, also for data of an old policy. Wider
bounds are the general taper of the paper. ROLL (`pg_variant: topr`) has the ratio of each token (`level: token`), and
takes the sign of the reward.

The paper sums log-probs over a sample, as `learner.normalization: constant` does up to a factor. Its rewards are 1 and
-1 (estimator `w_reinforce` with `positive: 1`), and a baseline changes the share of positive examples, which matters
for old data. Deviation: log r is limited to +-20.
"""  # noqa: E501, W505

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import NonNegativeFloat, Settings
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.importance import Level, ratio_at


class ToprOptions(Settings):
    """Level of the ratio, and its bounds by the sign of the advantage."""

    level: Level = "sequence"
    """Ratio of the `token`, the product over its sample (`sequence`), or the `geometric` mean over it."""
    positive_min: Annotated[float, Meta(ge=0)] = 1.0
    """Smallest weight of a token whose advantage is not negative."""
    positive_max: NonNegativeFloat = 1.0
    """Largest weight of a token whose advantage is not negative."""
    negative_min: Annotated[float, Meta(ge=0)] = 0.0
    """Smallest weight of a token with a negative advantage."""
    negative_max: NonNegativeFloat = 1.0
    """Largest weight of a token with a negative advantage."""

    def check_fields(self) -> None:
        for sign in ("positive", "negative"):
            least, most = getattr(self, f"{sign}_min"), getattr(self, f"{sign}_max")
            if least > most:
                raise ValueError(f"`{sign}_min` must be <= {sign}_max = {most}, got {least}")


class Topr(LossTerm):
    """The loss with its options."""

    Options: ClassVar[type[Settings]] = ToprOptions
    needs = ()

    def __init__(self, *, options: ToprOptions) -> None:
        self.options = options

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `weight` and `weight_capped`."""
        options, advantages = self.options, inputs["advantages"]
        ratio = ratio_at(inputs, (inputs.logprobs - inputs["behavior"]).detach(), options.level)
        weight = torch.where(
            advantages < 0,
            ratio.clamp(options.negative_min, options.negative_max),
            ratio.clamp(options.positive_min, options.positive_max),
        )
        loss = -(inputs["token_weight"] * weight * advantages * inputs.logprobs).sum()
        return loss, {"weight": weight, "weight_capped": (weight != ratio).to(weight.dtype)}
