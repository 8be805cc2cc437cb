"""ROVER: the log-ratio as the Q-value of the policy that chooses uniformly among all tokens.

Random Policy Valuation (2025, arXiv:2509.24981). With V the vocabulary, s' the state after the token, and old the
policy at the start of the update:

    Q(s, a) = rho * (log pi(a|s) - log old(a|s))
    target  = A + rho * mean over v in V of (log pi(v|s') - log old(v|s')),   0 instead of the mean at the last token of a sample
    loss    = (Q - sg[target])^2

A is the advantage: the reward minus the mean of its group, at every token (estimator `grpo` without scaling). Sampling
from the softmax of Q / rho is ordinary sampling. There is no clip and no ratio to the sampler. Deviations: s' is the
state before the sample's next trained token, so an observation between two turns belongs to the transition; log-probs
are at the sampling temperature.
"""  # noqa: E501, W505

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.trainer.features import FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.vocabulary_features import MeanLogprob


class RoverOptions(Settings):
    """Options of ROVER."""

    rho: PositiveFloat = 1.0
    """Factor of the log-ratio, the temperature of the softmax over Q."""


class Rover(LossTerm):
    """The loss with its options."""

    Options: ClassVar[type[Settings]] = RoverOptions
    needs = ("proximal",)
    needs_behavior = False
    features = {
        "rover_start": FeatureRequest(MeanLogprob(), "start"),
        "rover_current": FeatureRequest(MeanLogprob(), "current"),
    }

    def __init__(self, *, options: RoverOptions) -> None:
        self.options = options

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `value_of_next`, the mean of Q over the vocabulary in the next
        state."""
        rho, sample = self.options.rho, inputs["sample"]
        value = rho * (inputs["rover_current"] - inputs["rover_start"]).detach()
        follows = torch.cat([sample[1:] == sample[:-1], sample.new_zeros(1, dtype=torch.bool)])
        after = value.roll(-1).masked_fill(~follows, 0.0)
        error = rho * (inputs.logprobs - inputs["proximal"]) - (inputs["advantages"] + after)
        return (inputs["token_weight"] * error.square()).sum(), {"value_of_next": after}
