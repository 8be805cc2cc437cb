"""Group sequence policy optimization: the clipped surrogate with the ratio of whole samples.

Zheng et al. 2025 (arXiv:2507.18071), in its form per token (GSPO-token), with n trained tokens of the sample:

    s = (product of pi / mu over the sample) ** (1 / n)
    s_t = sg[s] * pi / sg[pi]
    loss = - min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A)

With one advantage per sample, value and gradient equal those of the form with s, and tokens may have different
advantages. The paper averages over samples: `learner.normalization: sequence_mean`. It has the policy at the start of
the update for mu, as `to: proximal` does; by default mu is the policy that sampled the token. `decoupled_ppo` with
`ratio: geometric` also weights the samples by the ratio of the two. `dual_clip` is that of `ppo_clip`, for s; TRL
(`delta`) has it, the paper and verl do not.

The bounds depend on the length. log s is a mean over n tokens: if the log-ratios of tokens are independent with
deviation d, that of log s is d / sqrt(n). Bounds at about one deviation of s clip the same share of the samples at each
length. Those of the paper, 3e-4 and 4e-4, are for thousands of tokens and small d: d = 0.02 gives 4e-4 at n = 2500. At
n = 18 the same d gives 5e-3, so that they clip almost every sample after one optimizer step. There, choose bounds of
0.003 to 0.03. The metrics `clipped_share` and `clipped_high_share` show the share; the paper reports about 0.15. With
the default `to`, s also contains the staleness and the difference of sampler and trainer, and needs wider bounds than
with `to: proximal`, where s is 1 at the first optimizer step.

Differences: TRL has one advantage per sample, and differentiates s itself; verl limits log s to 10; AReaL gives every
token the mean advantage of its sample, and excludes tokens from s that its rejection masks.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, Settings
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.ppo_clip import check_dual_clip, clipped_objective
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
    dual_clip: NonNegativeFloat = 0.0
    """Ratio above which a sample with a negative advantage gets no gradient; 0 disables it."""

    def check_fields(self) -> None:
        check_dual_clip(self.dual_clip, self.clip_high)


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
        low, high, dual = self.options.clip_low, self.options.clip_high, self.options.dual_clip
        objective, stats = clipped_objective(ratio, held, inputs["advantages"], low, high, dual)
        return -(inputs["token_weight"] * objective).sum(), stats


def geometric_ratio(inputs: LossInputs, to: str) -> tuple[Tensor, Tensor]:
    """Return s_t [m] against the column `to`, with the gradient of the token, and where it is limited to stay
    finite."""
    mean = inputs.sample_means(inputs.logprobs.detach() - inputs[to])
    # In this order the first two cancel exactly.
    log_ratio = inputs.logprobs - inputs.logprobs.detach() + mean
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp(), mean.abs() > LOG_RATIO_MAX
