"""SIREN: hold the entropy of the decisive tokens near its initial value.

Selective entropy regularization (2025, arXiv:2509.25133), in three selections:

    H_t      entropy of the distribution renormalized over its nucleus of mass top_p, in nats, with gradient
    peaks    tokens with H_t above the `quantile` of the H_t of their sample
    H        mean over samples of the mean of H_t over their peaks
    loss     (H - anchor)^2

The anchor is H in the first optimizer step of the run, under the initial policy; it is in the checkpoint. Of the value
per step, the gradient is exact whatever the split, for one more forward. The weight of the term is its coefficient.
Deviations: the quantile interpolates linearly, as in the code, but over trained tokens alone; H is over a whole
optimizer step, where the code has one H per micro-batch; a sample whose tokens all have the same entropy has no peak
and counts as H = 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import Settings
from rollmesh.trainer.features import FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.vocabulary_features import NucleusEntropy, NucleusOptions


class SirenOptions(NucleusOptions):
    """Options of SIREN."""

    quantile: Annotated[float, Meta(ge=0, lt=1)] = 0.8
    """Tokens above this quantile of the entropies of their sample are peaks."""


class Siren(LossTerm):
    """The regularizer with its options and its anchor."""

    Options: ClassVar[type[Settings]] = SirenOptions
    features: Mapping[str, FeatureRequest]
    needs = ()
    needs_behavior = False

    def __init__(self, *, options: SirenOptions) -> None:
        self.options = options
        self.anchor: float | None = None
        entropy = NucleusEntropy(options=NucleusOptions(top_p=options.top_p))
        self.features = {
            "siren_before": FeatureRequest(entropy, "step"),
            "siren_entropy": FeatureRequest(entropy, "current", grad=True),
        }

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return [M] the derivative of the loss by the entropy of each token, and a constant that completes its
        value."""
        entropy = columns["siren_before"]
        share = peak_shares(entropy, columns["sample"], self.options.quantile)
        mean = (share * entropy).sum()
        if self.anchor is None:
            self.anchor = float(mean)
        excess = mean - self.anchor
        slope = 2 * excess * share
        constant = excess.square() / len(entropy) - slope * entropy
        return {"siren_slope": slope, "siren_constant": constant, "siren_peak": (share > 0).to(entropy.dtype)}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `peak` and `nucleus_entropy`."""
        entropy = inputs["siren_entropy"]
        loss = (inputs["siren_slope"] * entropy + inputs["siren_constant"]).sum()
        return loss, {"peak": inputs["siren_peak"], "nucleus_entropy": entropy.detach()}

    def state(self) -> dict[str, Any]:
        return {"anchor": self.anchor}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.anchor = state["anchor"]


def peak_shares(entropy: Tensor, sample: Tensor, quantile: float) -> Tensor:
    """Return [M]: 1 / (samples * peaks of the sample) for a peak, 0 for another token."""
    shares = torch.zeros_like(entropy)
    numbers = sorted(set(sample.tolist()))
    for number in numbers:
        at = sample == number
        peak = at & (entropy > entropy[at].quantile(quantile))
        shares[peak] = 1 / (len(numbers) * int(peak.sum())) if peak.any() else 0.0
    return shares
