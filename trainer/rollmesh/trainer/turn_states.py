"""The feature `TurnStates`: hidden states before and after each turn, projected at random.

The state before a turn has read all of the conversation up to its first trained token; the state after it has read its
last trained token.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from rollmesh.shared.config.settings import NonNegativeInt, Settings
from rollmesh.trainer.features import Feature, FeatureInputs
from rollmesh.trainer.hidden_features import sparse_projection


class TurnStatesOptions(Settings):
    """Options of the feature."""

    dimensions: Annotated[int, Meta(ge=1, le=4096)] = 256
    """Dimensions of a state after the projection. States of a model that is not wider are not projected. A token of the
    batch takes 8 bytes per dimension."""
    projection_seed: NonNegativeInt = 0
    """Seed of the projection, which is the same in all updates."""


class TurnStates(Feature):
    """[m, 2k]: the k numbers of the state before the token's turn, and the k numbers of the state after it."""

    Options: ClassVar[type[Settings]] = TurnStatesOptions
    reads_hidden = True

    def __init__(self, *, options: TurnStatesOptions) -> None:
        self.options = options

    @torch.no_grad()
    def __call__(self, inputs: FeatureInputs) -> Tensor:
        hidden, after = inputs.hidden, inputs.after
        if hidden is None or after is None:
            raise ValueError("the feature reads hidden states, which this pass did not compute; set `reads_hidden`")
        number, first, last = turn_bounds(inputs.columns["sample"], inputs.columns["turn"])
        states = torch.stack([hidden[first], after[last]], dim=1).float()
        if (width := states.shape[-1]) > self.options.dimensions:
            states = states @ sparse_projection(width, self.options.dimensions, self.options.projection_seed).to(states)
        return states.flatten(1)[number].to(inputs.logprobs)


def turn_bounds(sample: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return [m] the number of the turn of each token, from 0, and [n] the first and the last token of each turn."""
    begins = torch.cat([sample.new_ones(1, dtype=torch.bool), (sample[1:] != sample[:-1]) | (turn[1:] != turn[:-1])])
    begins = begins[: len(sample)]
    first = begins.nonzero().squeeze(-1)
    return begins.cumsum(0) - 1, first, torch.cat([first[1:], first.new_tensor([len(sample)])])[: len(first)] - 1
