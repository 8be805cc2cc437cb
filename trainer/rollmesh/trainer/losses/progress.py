"""Progress head of SPA: contributions of turns whose sum predicts the reward.

Stepwise Progress Attribution (2025, arXiv:2505.20732). A linear head reads the hidden state at the last token of each
turn and gives the contribution c of the turn:

    loss = (sum over the turns of a sample of c - R)^2

with R the reward of the sample, averaged as `learner.normalization` says (`sequence_mean`: over samples). The head is
trained with the policy, is in the checkpoint, and is never published. Deviations: the paper trains a separate copy of
the model as the estimator, before the policy; here the head reads the states of the policy and, by default, does not
change them (`through`); the state is the one that predicts the last token of the turn, which has read all of its text.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from rollmesh.shared.config.settings import Settings
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats


class ProgressOptions(Settings):
    """Options of the head."""

    through: bool = False
    """Let the gradient of the head pass into the policy."""


class Progress(LossTerm):
    """The head with its options."""

    Options: ClassVar[type[Settings]] = ProgressOptions
    needs = ()
    needs_behavior = False

    def __init__(self, *, options: ProgressOptions) -> None:
        self.options = options

    def make_module(self, hidden_size: int) -> nn.Module:
        """Return the head."""
        self.module = nn.Linear(hidden_size, 1)
        return self.module

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `progress_error`, the error of the sample, and `progress`, the
        contribution of its turn at the last token of the turn and 0 elsewhere."""
        assert inputs.hidden is not None, "a term with a module gets the hidden states"
        hidden = inputs.hidden if self.options.through else inputs.hidden.detach()
        progress = self.module(hidden).squeeze(-1) * ends_of_turns(inputs["sample"], inputs["turn"])
        error = inputs.sample_sums(progress) - inputs["reward"]
        weight = inputs["token_weight"]
        return (weight * error.square()).sum(), {"progress": progress.detach(), "progress_error": error.detach()}


def ends_of_turns(sample: Tensor, turn: Tensor) -> Tensor:
    """Return [m] 1 at the last trained token of each turn of each sample, and 0 elsewhere."""
    differs = (sample[1:] != sample[:-1]) | (turn[1:] != turn[:-1])
    return torch.cat([differs, differs.new_ones(1)]).float()
