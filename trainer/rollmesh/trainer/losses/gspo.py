"""Group sequence policy optimization: the clipped surrogate with the ratio of whole samples.

Zheng et al. 2025 (arXiv:2507.18071), in its form per token (GSPO-token), with n trained tokens of the sample:

    s = (product of pi / mu over the sample) ** (1 / n)
    s_t = sg[s] * pi / sg[pi]
    loss = - min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A)

With one advantage per sample, value and gradient equal those of the form with s, and tokens may have different
advantages. s varies much less than the ratio of a token, so the bounds are narrow. The paper averages over samples:
`learner.normalization: sequence_mean`. The paper has the policy at the start of the update for mu, as `to: proximal`
does; by default mu is the policy that sampled the token. `decoupled_ppo` with `ratio: geometric` also weights the
samples by the ratio of the two. Differences: TRL has one advantage per sample, and differentiates s itself; verl limits
log s to 10; AReaL gives every token the mean advantage of its sample, and excludes tokens from s that its rejection
masks.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.ppo_clip import clipped_objective
from rollmesh.trainer.losses.ratio import LOG_RATIO_MAX


class GspoOptions(Settings):
    """Bounds of the ratio of a sample."""

    clip_low: Annotated[float, Meta(gt=0, lt=1)] = 3e-4
    """Distance below 1 up to which a sample gets a gradient if its advantage is negative."""
    clip_high: PositiveFloat = 4e-4
    """Distance above 1 if it is positive."""
    to: Literal["behavior", "proximal"] = "behavior"
    """The policy mu: the one that sampled the token, or the policy at the start of the update, which costs one more
    forward pass."""


class Gspo(LossTerm):
    """The loss with its options."""

    Options: ClassVar[type[Settings]] = GspoOptions

    def __init__(self, *, options: GspoOptions) -> None:
        self.options = options

    @property
    def needs(self) -> tuple[str, ...]:
        return () if self.options.to == "behavior" else (self.options.to,)

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `clipped` and `clipped_high`."""
        ratio, held = geometric_ratio(inputs, self.options.to)
        low, high = self.options.clip_low, self.options.clip_high
        objective, stats = clipped_objective(ratio, held, inputs["advantages"], low, high)
        return -(inputs["token_weight"] * objective).sum(), stats


def geometric_ratio(inputs: LossInputs, to: str) -> tuple[Tensor, Tensor]:
    """Return s_t [m] against the column `to`, with the gradient of the token, and where it is limited to stay
    finite."""
    mean = inputs.sample_means(inputs.logprobs.detach() - inputs[to])
    # In this order the first two cancel exactly.
    log_ratio = inputs.logprobs - inputs.logprobs.detach() + mean
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp(), mean.abs() > LOG_RATIO_MAX
