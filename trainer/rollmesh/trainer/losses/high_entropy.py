"""Clipped surrogate on the tokens with the highest entropy alone.

Wang et al. 2025, "Beyond the 80/20 rule" (arXiv:2506.01939): a minority of tokens has a high entropy and decides how
the text continues, and gradients of the other tokens do not help. With H the entropy of a token's distribution and tau
the threshold that `share` of the tokens reach:

    loss = - 1[H >= tau] * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A),   r = pi / mu

The loss is averaged over the selected tokens. Deviations from the paper: H is that of the sampling distribution, which
the engine returns as `entropy`, and not that of the current policy; tau is over the tokens of a whole optimizer step,
and not of a micro-batch, so that the result does not depend on the split. Tokens that tie with tau are selected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import Settings
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.losses.ppo_clip import PpoClipOptions, clipped_objective
from rollmesh.trainer.losses.ratio import out_of_range, safe_ratio


class HighEntropyOptions(PpoClipOptions):
    """Bounds of the probability ratio, and the share of tokens."""

    share: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """Share of the tokens of an optimizer step that get a gradient (rho in the paper)."""


class HighEntropy(LossTerm):
    """The loss with its options."""

    Options: ClassVar[type[Settings]] = HighEntropyOptions
    needs: tuple[str, ...] = ("entropy",)

    def __init__(self, *, options: HighEntropyOptions) -> None:
        self.options = options

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `high_entropy` [m], 1 for selected tokens, and `high_entropy_weight` [m], their weights with the sum
        of all weights."""
        entropy, weight = columns["entropy"], columns["token_weight"]
        threshold = entropy.topk(math.ceil(self.options.share * len(entropy))).values[-1]
        selected = (entropy >= threshold).to(weight.dtype)
        total = (weight * selected).sum()
        scale = weight.sum() / total if total > 0 else total
        return {"high_entropy": selected, "high_entropy_weight": weight * selected * scale}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `clipped`, `clipped_high` and `high_entropy`."""
        limit = self.options.log_ratio_max
        ratio = safe_ratio(inputs.logprobs, inputs["behavior"], limit)
        held = out_of_range(inputs.logprobs, inputs["behavior"], limit)
        low, high, dual = self.options.clip_low, self.options.clip_high, self.options.dual_clip
        objective, stats = clipped_objective(ratio, held, inputs["advantages"], low, high, dual)
        loss = -(inputs["high_entropy_weight"] * objective).sum()
        return loss, {**stats, "high_entropy": inputs["high_entropy"]}
