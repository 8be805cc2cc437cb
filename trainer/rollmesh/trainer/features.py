"""Features: per-token values that the trainer computes with a model for estimators, loss terms and update rules.

A request says which feature, and under which weights:

    start       the policy before the first optimizer step of the update, without gradient; available to estimators
    reference   the reference model (`learner.reference`), without gradient; available to estimators
    step        the policy before each optimizer step, without gradient, over all tokens of the step; costs one more forward
    current     the policy in the forward of the micro-batch, with gradient if the request asks

`needs` of an estimator, a loss term or an update rule names outputs of the engine, features of `learner.features`, and
these:

    proximal         log-prob of the token under `start`
    reference        log-prob of the token under `reference`
    current          log-prob of the token under `step`
    gradient_square  squared norm of the gradient of the log-prob of the token's sample, under `start`; costs a backward per sample

Their attribute `features` maps the names of further columns to requests. Values are at the temperature that the token
was sampled at. Equal requests are computed once, whatever their names.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from torch import Tensor

from rollmesh.shared.config.plugin import Plugin, overrides, required
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.domain.trajectory import TrainingSample
from rollmesh.trainer.router import RouterLogits
from rollmesh.trainer.sequences import Sequence1D

Under = Literal["start", "reference", "step", "current"]
GRADIENT_SQUARE = "gradient_square"


class FeatureInputs:
    """What a feature reads: m trained tokens of one micro-batch. Sequences are whole, so sums over a sample are
    possible, except for a feature with `by_token`, which gets the tokens of a micro-batch in one or several parts.

    A feature with `sequences_of` gets the inputs of the sequences that it made.
    """

    def __init__(
        self,
        *,
        logits: Tensor | Callable[[], Tensor],
        token_ids: Tensor,
        logprobs: Tensor,
        hidden: Tensor | None,
        columns: Mapping[str, Tensor],
        after: Tensor | None = None,
        router: RouterLogits | None = None,
    ) -> None:
        """`logits` may be a function, which every access calls."""
        self._logits = logits
        self.token_ids = token_ids
        """[m] the tokens."""
        self.logprobs = logprobs
        """[m] their log-probs."""
        self.hidden = hidden
        """[m, d] last hidden states, from which the logits are computed; None unless some feature of the pass has
        `reads_hidden`."""
        self.columns = columns
        """The columns of the table for these tokens."""
        self.after = after
        """[m, d] last hidden states that have read the tokens; None where `hidden` is."""
        self.router = router
        """Router logits at the positions from which the tokens are predicted; None unless some feature of the pass has
        `reads_router`."""

    @property
    def logits(self) -> Tensor:
        """[m, V] float32 at the sampling temperature, from which the tokens are predicted. They are computed again for
        a feature without `by_token` if the output layer runs in parts."""
        return self._logits if isinstance(self._logits, Tensor) else self._logits()


class Feature(Plugin):
    """Base of features: a function of the model's outputs. Constructed as `cls(options=...)`, or as `cls()` if the
    class has no `Options`."""

    options: Any = None
    """Its options, a struct. Requests of one class with equal options are computed once."""
    reads_hidden: bool = False
    """Whether it reads `FeatureInputs.hidden` or `FeatureInputs.after`."""
    reads_router: bool = False
    """Whether it reads `FeatureInputs.router`."""
    by_token: bool = False
    """Whether the value of a token depends on its own row only, so that the logits of all tokens need not exist at once
    (`learner.compute.logprob_chunk_tokens`)."""

    @required
    def __call__(self, inputs: FeatureInputs) -> Tensor:
        """Return [m] or [m, k]."""
        raise NotImplementedError

    def sequences_of(self, sample: TrainingSample) -> Sequence[Sequence1D] | None:
        """Return sequences whose targets, one sequence after the other, are the trained tokens of the sample in their
        order.

        A feature with this method reads these sequences instead of those that were sampled, such as the same answer
        after another prompt. They cost separate forwards, and under `current` with gradient they stay in memory until
        the backward of the micro-batch. None drops the sample as NO_OTHER_PROMPT.
        """
        raise NotImplementedError

    def use_tokenizer(self, encode: Callable[[str], list[int]] | None) -> None:
        """Take a function from a text to token ids without special tokens around it, before the first update; None if
        the model has no tokenizer. Raises ConfigError if the feature cannot work without it."""


FEATURES = Registry(
    "feature",
    {
        "entropy": "rollmesh.trainer.vocabulary_features:Entropy",
        "nucleus_entropy": "rollmesh.trainer.vocabulary_features:NucleusEntropy",
        "mean_logprob": "rollmesh.trainer.vocabulary_features:MeanLogprob",
        "kept_logprob": "rollmesh.trainer.vocabulary_features:KeptLogprob",
        "kept_mass": "rollmesh.trainer.vocabulary_features:KeptMass",
        "effective_rank": "rollmesh.trainer.hidden_features:EffectiveRank",
        "mean_state": "rollmesh.trainer.hidden_features:MeanState",
        "other_prompt_logprob": "rollmesh.trainer.other_prompt:OtherPromptLogprob",
    },
    Feature,
)


@dataclass(frozen=True, slots=True)
class FeatureRequest:
    """A feature under some weights. `grad`: with gradient, under `current` only."""

    feature: Feature
    under: Under = "start"
    grad: bool = False

    def __post_init__(self) -> None:
        FEATURES.adopt(self.feature)
        if self.grad and self.under != "current":
            raise ValueError(f"`grad` requires under = current, got {self.under}")

    @property
    def function(self) -> Hashable:
        """Equal for equal features: those of one class with equal `options`, or without any attribute."""
        if isinstance(self.feature.options, msgspec.Struct):
            return type(self.feature), msgspec.json.encode(self.feature.options)
        return type(self.feature), id(self.feature) if self.feature.__getstate__() else None

    @property
    def key(self) -> Hashable:
        """Equal for requests of the same values."""
        return self.function, self.under, self.grad

    @property
    def reads_others(self) -> bool:
        """Whether the feature reads other sequences than those that were sampled."""
        return overrides(self.feature, Feature.sequences_of)


class TokenLogprob(Feature):
    """The log-prob of the token."""

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        return inputs.logprobs


BUILT_IN = {
    "proximal": FeatureRequest(TokenLogprob(), "start"),
    "reference": FeatureRequest(TokenLogprob(), "reference"),
    "current": FeatureRequest(TokenLogprob(), "step"),
}
"""Requests that `needs` names directly."""


def merged_requests(*parts: tuple[str, Mapping[str, FeatureRequest]]) -> dict[str, FeatureRequest]:
    """Return the requests of all parts, given with their names. Raises ValueError if two of them use one name for
    different requests."""
    found: dict[str, FeatureRequest] = {}
    for part, requests in parts:
        for name, request in requests.items():
            if found.setdefault(name, request).key != request.key:
                raise ValueError(
                    f"{part} requests the feature `{name}`, which names another request of this run; rename it"
                )
    return found
