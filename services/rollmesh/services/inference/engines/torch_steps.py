"""Whole steps, each compiled to one scripted call: the model forward, and sampling or scoring of its output.

Annotations are evaluated (no `from __future__ import annotations`): TorchScript resolves them.
"""

import torch
from torch import Tensor

from rollmesh.services.inference.engines.sampling import Rules, sample
from rollmesh.services.inference.engines.torch_model import PackedStep, Rotary, Shape, Weights, forward, logits_of


def sample_step(
    w: Weights,
    shape: Shape,
    rotary: Rotary,
    keys: Tensor,
    values: Tensor,
    batch: PackedStep,
    picks: Tensor,
    rules: Rules,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the forward pass, and draw the token after each of the packed tokens numbered `picks` [B]."""
    hidden = forward(w, shape, rotary, keys, values, batch)
    return sample(logits_of(w, shape, hidden.index_select(0, picks)), rules)


def score_step(w: Weights, shape: Shape, rotary: Rotary, keys: Tensor, values: Tensor, batch: PackedStep) -> Tensor:
    """[N] float32: log-prob, after packed token i, of packed token i + 1. Meaningless at the end of a sequence."""
    logits = logits_of(w, shape, forward(w, shape, rotary, keys, values, batch))
    following = batch.tokens.roll(-1)
    return torch.log_softmax(logits, dim=-1).gather(1, following[:, None])[:, 0]
