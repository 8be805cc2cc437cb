"""Importance weights: the level of a ratio, the treatment of weights outside their bounds, and the rejection of whole
samples.

With r the ratio of two policies at a token, and n the trained tokens of its sample, the weight of the token is

    token       r                            low variance; ignores that the tokens before it were drawn by another policy
    sequence    product of r over the n      unbiased; its variance grows exponentially with n
    geometric   the same to the power 1 / n  the mean drift of the sample, comparable between lengths (arXiv:2507.18071)

A weight outside [weight_min, weight_max] becomes the nearest bound (`truncate`, Ionides 2008) or 0 (`mask`). A mask
with both bounds is a band, as in IcePop (ringtech.notion.site/icepop). With `weight_min` and `weight_max` of 1, all
weights are 1.

Rejection gives every token of a sample the weight 0 if a ratio of the sample, of a separate level, is outside its
bounds, or if the ratio of one of its tokens is below `veto_min`. Bounds near 1 on the geometric mean with a veto of
1e-4 reject samples on which sampler and trainer disagree (KernelGYM, 2026). With `reject_only: negative` and a
geometric `reject_min` of exp(-delta), it is the off-policy mask of DeepSeek-V3.2 (arXiv:2512.02556), which drops errors
whose mean divergence from the sampler exceeds delta.

Weights have no gradient. Masked and rejected tokens still count in the average of the loss, as in TRL and AReaL, so
that it does not depend on the policy; verl divides by the remaining tokens. Bounds of a rejection are on pi / mu here,
on mu / pi in verl.
"""  # noqa: E501, W505

from __future__ import annotations

from typing import Annotated, Literal

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import Settings
from rollmesh.trainer.losses.base import LossInputs, TokenStats
from rollmesh.trainer.losses.ratio import LOG_RATIO_MAX

Level = Literal["token", "sequence", "geometric"]


class ImportanceOptions(Settings):
    """Bounds of importance weights."""

    level: Level = "token"
    """Ratio that is the weight: that of the `token`, the product over its sample (`sequence`), or the `geometric` mean
    over it."""
    weight_min: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Smallest weight."""
    weight_max: Annotated[float, Meta(ge=1)] = 2.0
    """Largest weight. A higher value gives less bias and more variance."""
    outside: Literal["truncate", "mask"] = "truncate"
    """A weight outside the bounds becomes the nearest bound (`truncate`) or 0 (`mask`)."""
    reject_level: Literal["none", "token", "sequence", "geometric"] = "none"
    """Ratio by which whole samples are rejected; `token` rejects a sample if one of its tokens is outside the
    bounds."""
    reject_min: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Smallest ratio of a sample that is not rejected."""
    reject_max: Annotated[float, Meta(ge=1)] = 2.0
    """Largest ratio of a sample that is not rejected."""
    veto_min: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """A sample is rejected if one of its tokens has a smaller ratio, whatever `reject_level` is; 0 disables it."""
    reject_only: Literal["all", "negative"] = "all"
    """Tokens that rejection removes: `all` of the sample, or those with a `negative` advantage."""


def importance_weights(
    inputs: LossInputs, numerator: Tensor, denominator: Tensor, options: ImportanceOptions
) -> tuple[Tensor, TokenStats]:
    """Return the weights [m] for log-probs [m] of two policies, and per token `weight_capped` and, with rejection,
    `rejected`."""
    log_ratio = (numerator - denominator).detach()
    ratio = ratio_at(inputs, log_ratio, options.level)
    outside = (ratio < options.weight_min) | (ratio > options.weight_max)
    weight = ratio.clamp(options.weight_min, options.weight_max)
    if options.outside == "mask":
        weight = weight.masked_fill(outside, 0.0)
    stats = {"weight_capped": outside.to(weight.dtype)}
    if options.reject_level != "none" or options.veto_min:
        rejected = _rejected(inputs, log_ratio, options)
        weight = weight.masked_fill(rejected, 0.0)
        stats["rejected"] = rejected.to(weight.dtype)
    return weight, stats


def ratio_at(inputs: LossInputs, log_ratio: Tensor, level: Level) -> Tensor:
    """Return the ratio [m] of each token at a level, given the log-ratios [m] of the tokens. The exponent is limited to
    stay finite."""
    if level == "sequence":
        log_ratio = inputs.sample_sums(log_ratio)
    elif level == "geometric":
        log_ratio = inputs.sample_means(log_ratio)
    return log_ratio.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def _rejected(inputs: LossInputs, log_ratio: Tensor, options: ImportanceOptions) -> Tensor:
    """Return where the weight is 0 [m], because the sample is outside a bound."""
    outside = ratio_at(inputs, log_ratio, "token") < options.veto_min
    if options.reject_level != "none":
        ratio = ratio_at(inputs, log_ratio, options.reject_level)
        outside = outside | (ratio < options.reject_min) | (ratio > options.reject_max)
    rejected = inputs.sample_sums(outside.to(torch.float32)) > 0
    return rejected & (inputs["advantages"] < 0) if options.reject_only == "negative" else rejected
