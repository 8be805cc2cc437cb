"""Entropy of correct samples, most for those that differ from the other correct ones: the local scale of DSDR (2026-02,
arXiv:2602.19895).

    loss = - mean over groups of sum over samples i of share_i mean_t h_t,   h_t = - min(r_t, weight_max) log pi_t,   r_t = pi_t / mu_t

h is the paper's estimate of the entropy of the policy from the sampled token, with gradient, also through r; mu is the
policy that sampled it. Its mean over the tokens of the sample makes it independent of the length. share is the column
`diversity_share` of the estimator `dsdr`, which is 0 for wrong samples and sums to 1 over the correct members of a
group, leased or not. Groups are those of the optimizer step. The weight of the term is its coefficient (0.001 in the
paper). Deviations: r is limited, which the paper does not do; a token at the limit has no gradient through r. `exact:
true` takes the entropy over the vocabulary at the sampled tokens, without r, which has less variance.
"""  # noqa: E501, W505

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.trainer.features import FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.vocabulary_features import Entropy

FACTOR = "dsdr_entropy_factor"


class DsdrEntropyOptions(Settings):
    """Options of the term."""

    exact: bool = False
    """Take the entropy over the vocabulary, not its estimate from the sampled token."""
    weight_max: PositiveFloat = 10.0
    """Largest ratio of the policy to the one that sampled the token."""


class DsdrEntropy(LossTerm):
    """The term with its options."""

    Options: ClassVar[type[Settings]] = DsdrEntropyOptions
    needs = ("diversity_share",)

    def __init__(self, *, options: DsdrEntropyOptions) -> None:
        self.options = options

    @property
    def needs_behavior(self) -> bool:
        return not self.options.exact

    @property
    def features(self) -> Mapping[str, FeatureRequest]:
        return {"dsdr_entropy": FeatureRequest(Entropy(), "current", grad=True)} if self.options.exact else {}

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return [M] the factor of the entropy of each token."""
        share, sample = columns["diversity_share"], columns["sample"]
        lengths = sample.bincount()[sample]
        return {FACTOR: share / (lengths * len(set(columns["group"].tolist())))}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token whether it is of a correct sample (`correct`)."""
        factor = inputs[FACTOR]
        if self.options.exact:
            entropy = inputs["dsdr_entropy"]
        else:
            limit = math.log(self.options.weight_max)
            ratio = (inputs.logprobs - inputs["behavior"]).clamp(max=limit).exp()
            entropy = -ratio * inputs.logprobs
        return -(factor * entropy).sum(), {"correct": (factor > 0).to(factor.dtype)}
