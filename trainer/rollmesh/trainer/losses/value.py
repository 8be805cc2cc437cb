"""Critic of PPO: a head that predicts the return of a sample before each of its tokens, for the estimator `gae`.

Schulman et al. 2017 (arXiv:1707.06347); the clip as in verl (core_algos.py, `compute_value_loss`), and in the
PPOTrainer of earlier versions of TRL, which 1.16 does not have. With V the head's value, V' its value at the start of
the update, and `returns` the target of the estimator:

    loss = max((V - return)^2, (clip(V, V' - clip, V' + clip) - return)^2) / 2

The head reads the last hidden state before the token. It is trained with the policy, is in the checkpoint, and is never
published. Its last layer begins with 0, so that V is 0 at the first update. `modules_factor` of the optimizer is its
learning rate over that of the policy.

Deviations: the critic of both is a separate model of the size of the policy; here it has one hidden layer above
the states of the policy, which by default it does not change (`through`). `clip_norm` limits the gradient of the head
apart from that of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from rollmesh.shared.config.settings import NonNegativeFloat, Settings
from rollmesh.trainer.features import Feature, FeatureInputs, FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats


class ValueOptions(Settings):
    """Options of the critic."""

    clip: NonNegativeFloat = 0.5
    """Distance from the value at the start of the update up to which a value gets a gradient; 0 does not clip."""
    through: bool = False
    """Let the gradient of the head pass into the policy."""


class Value(LossTerm):
    """The head with its options."""

    Options: ClassVar[type[Settings]] = ValueOptions
    features: Mapping[str, FeatureRequest]
    needs = ("returns",)
    needs_behavior = False

    def __init__(self, *, options: ValueOptions) -> None:
        self.options = options
        self.features = {"values": FeatureRequest(HeadValue(self), "start")}

    def make_module(self, hidden_size: int) -> nn.Module:
        """Return the head."""
        last = nn.Linear(hidden_size, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.module = nn.Sequential(nn.Linear(hidden_size, hidden_size), nn.ReLU(), last)
        return self.module

    def value_of(self, hidden: Tensor) -> Tensor:
        """Return the values [m] of states [m, d]."""
        found: Tensor = self.module(hidden.to(next(self.module.parameters()).dtype)).squeeze(-1)
        return found

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `value`, `value_loss` and `value_clipped`."""
        assert inputs.hidden is not None, "a term with a module gets the hidden states"
        value = self.value_of(inputs.hidden if self.options.through else inputs.hidden.detach())
        errors = (value - inputs["returns"]).square()
        clipped = torch.zeros_like(errors, dtype=torch.bool)
        if self.options.clip:
            before = inputs["values"]
            bounded = torch.clamp(value, before - self.options.clip, before + self.options.clip)
            of_bounded = (bounded - inputs["returns"]).square()
            clipped = of_bounded > errors
            errors = torch.maximum(errors, of_bounded)
        losses = errors / 2
        stats = {"value": value.detach(), "value_loss": losses.detach(), "value_clipped": clipped.to(losses.dtype)}
        return (inputs["token_weight"] * losses).sum(), stats


class HeadValue(Feature):
    """The feature `values` [m]: the head's value before the token."""

    reads_hidden = True

    def __init__(self, term: Value) -> None:
        self.term = term

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        assert inputs.hidden is not None, "the pass computes the hidden states for it"
        return self.term.value_of(inputs.hidden)
