"""Built-in features: reductions of the distribution over the vocabulary, each of one token alone."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import Settings
from rollmesh.trainer.features import Feature, FeatureInputs


class Entropy(Feature):
    """Entropy [m] of the distribution, in nats."""

    by_token = True

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        logprobs = inputs.logits.log_softmax(-1)
        return -(logprobs.exp() * logprobs).sum(-1)


class NucleusOptions(Settings):
    """Options of `nucleus_entropy`."""

    top_p: Annotated[float, Meta(gt=0, le=1)] = 0.8
    """Mass of the nucleus."""


class NucleusEntropy(Feature):
    """Entropy [m] of the distribution renormalized over its nucleus, in nats.

    The nucleus is the smallest set of most likely tokens whose mass reaches `top_p` (arXiv:1904.09751). Its choice has
    no gradient.
    """

    Options: ClassVar[type[Settings]] = NucleusOptions
    by_token = True

    def __init__(self, *, options: NucleusOptions) -> None:
        self.options = options

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        ordered, order = inputs.logits.detach().softmax(-1).sort(dim=-1, descending=True, stable=True)
        kept = torch.zeros_like(ordered, dtype=torch.bool)
        kept.scatter_(-1, order, ordered.cumsum(-1) - ordered < self.options.top_p)
        logprobs = inputs.logits.masked_fill(~kept, float("-inf")).log_softmax(-1)
        return -(logprobs.exp() * logprobs.masked_fill(~kept, 0.0)).sum(-1)


class MeanLogprob(Feature):
    """Mean [m] of the log-probs of all tokens of the vocabulary."""

    by_token = True

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        return inputs.logits.mean(-1) - inputs.logits.logsumexp(-1)


class KeptOptions(Settings):
    """Options of `kept_logprob` and `kept_mass`."""

    threshold: Annotated[float, Meta(ge=0, lt=1)] = 0.02
    """Probability below which a token is removed; with `relative`, as a share of the largest one."""
    kind: Literal["fixed", "relative"] = "fixed"
    """`relative` is min-p sampling (arXiv:2407.01082)."""


class KeptLogprob(Feature):
    """Log-prob [m] of the token under the distribution without its unlikely tokens, renormalized; -inf for a removed
    token.

    Without gradient of the choice. If all tokens are below a fixed threshold, all are removed.
    """

    Options: ClassVar[type[Settings]] = KeptOptions
    by_token = True

    def __init__(self, *, options: KeptOptions) -> None:
        self.options = options

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        logprobs = inputs.logits.log_softmax(-1)
        removed, token = _removed(logprobs, self.options), inputs.token_ids[:, None]
        mass = logprobs.masked_fill(removed, float("-inf")).logsumexp(-1, keepdim=True)
        chosen = logprobs.gather(-1, token) - mass
        return chosen.masked_fill(removed.gather(-1, token), float("-inf")).squeeze(-1)


class KeptMass(Feature):
    """Probability [m] of the tokens that are not removed, together."""

    Options: ClassVar[type[Settings]] = KeptOptions
    by_token = True

    def __init__(self, *, options: KeptOptions) -> None:
        self.options = options

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        logprobs = inputs.logits.log_softmax(-1)
        return logprobs.exp().masked_fill(_removed(logprobs, self.options), 0.0).sum(-1)


def _removed(logprobs: Tensor, options: KeptOptions) -> Tensor:
    """Return [m, V]: which tokens are below the threshold."""
    least = torch.full_like(logprobs[:, :1], options.threshold).log()
    if options.kind == "relative":
        least = least + logprobs.max(-1, keepdim=True).values
    return logprobs < least
