"""Entropy of correct samples, most for those that differ from the other correct ones: the local scale of DSDR (2026-02,
arXiv:2602.19895).

    loss = - mean over groups of sum over samples i of share_i mean_t H_t

H is the entropy of the policy at the trained tokens of the sample, in nats, with gradient; its mean over the tokens
makes it independent of the length. share is the column `diversity_share` of the estimator `dsdr`, which is 0 for wrong
samples and sums to 1 over the correct members of a group, leased or not. Groups are those of the optimizer step. The
weight of the term is its coefficient. Deviation: the entropy is that of the distribution at the sampling temperature,
at the sampled tokens without an importance weight.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rollmesh.trainer.features import FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.vocabulary_features import Entropy

FACTOR = "dsdr_entropy_factor"


class DsdrEntropy(LossTerm):
    """The term. It has no options."""

    needs = ("diversity_share",)
    needs_behavior = False
    features = {"dsdr_entropy": FeatureRequest(Entropy(), "current", grad=True)}

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return [M] the factor of the entropy of each token."""
        share, sample = columns["diversity_share"], columns["sample"]
        lengths = sample.bincount()[sample]
        return {FACTOR: share / (lengths * len(set(columns["group"].tolist())))}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token whether it is of a correct sample (`correct`)."""
        factor = inputs[FACTOR]
        return -(factor * inputs["dsdr_entropy"]).sum(), {"correct": (factor > 0).to(factor.dtype)}
