"""Progress head of SPA: contributions of turns whose sum predicts the reward.

Stepwise Progress Attribution (2025, arXiv:2505.20732). A linear head reads the hidden state after the last token of
each turn and gives the contribution c of the turn:

    loss = mean over samples of (sum over the turns of the sample of c - R)^2

with R the reward of the sample. The head is trained with the policy, is in the checkpoint, and is never published. The
feature `progress_values` has the contribution of the turn of each token under the head and the policy at the start of
the update; the estimator `spa` makes rewards of it. Deviations: the paper trains a separate copy of the model as the
estimator, before the policy; here the head reads the states of the policy and, by default, does not change them
(`through`). The published head reads the logits of the token, here it reads the state from which they are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from rollmesh.shared.config.settings import NonNegativeFloat, Settings
from rollmesh.trainer.features import Feature, FeatureInputs, FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.regression import regression_loss
from rollmesh.trainer.turn_states import turn_bounds

WEIGHT = "progress/weight"


class ProgressOptions(Settings):
    """Options of the head."""

    through: bool = False
    """Let the gradient of the head pass into the policy."""
    huber: NonNegativeFloat = 0.0
    """Error of a sample beyond which its loss is linear, for noisy rewards (`regression.py`). 0: squared everywhere."""


class Progress(LossTerm):
    """The head with its options."""

    Options: ClassVar[type[Settings]] = ProgressOptions
    features: Mapping[str, FeatureRequest]
    needs = ()
    needs_behavior = False

    def __init__(self, *, options: ProgressOptions) -> None:
        self.options = options
        self.features = {"progress_values": FeatureRequest(ProgressValues(self), "start")}

    def make_module(self, hidden_size: int) -> nn.Module:
        """Return the head."""
        self.module = nn.Linear(hidden_size, 1)
        return self.module

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weight of each token, so that every sample of the step counts alike, whatever
        `learner.normalization`."""
        _, place, count = torch.unique(columns["sample"], return_inverse=True, return_counts=True)
        return {WEIGHT: 1.0 / (len(count) * count[place]).float()}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `progress_error`, the error of the sample, and `progress`, the
        contribution of its turn at the last token of the turn and 0 elsewhere."""
        assert inputs.after is not None, "a term with a module gets the hidden states"
        states = inputs.after if self.options.through else inputs.after.detach()
        _, _, last = turn_bounds(inputs["sample"], inputs["turn"])
        at_end = torch.zeros(len(states), device=states.device).index_fill(0, last, 1.0)
        progress = self.module(states).squeeze(-1) * at_end
        error = inputs.sample_sums(progress) - inputs["reward"]
        return (inputs[WEIGHT] * regression_loss(error, self.options.huber)).sum(), {
            "progress": progress.detach(),
            "progress_error": error.detach(),
        }


class ProgressValues(Feature):
    """The feature `progress_values` [m]: the contribution of the token's turn."""

    reads_hidden = True

    def __init__(self, term: Progress) -> None:
        self.term = term

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        assert inputs.after is not None, "the pass computes the hidden states"
        number, _, last = turn_bounds(inputs.columns["sample"], inputs.columns["turn"])
        values: Tensor = self.term.module(inputs.after[last].float()).squeeze(-1)[number].to(inputs.logprobs)
        return values
