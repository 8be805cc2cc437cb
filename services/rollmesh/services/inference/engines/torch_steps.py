"""Whole steps, each compiled to one scripted call: the model forward, and sampling or scoring of its output.

Annotations are evaluated (no `from __future__ import annotations`): TorchScript resolves them.
"""

import torch
from torch import Tensor

from rollmesh.services.inference.engines.common.sampling import Rules, half, measure, sample
from rollmesh.services.inference.engines.torch.model import (
    PackedStep,
    Rotary,
    Shape,
    Weights,
    forward,
    logits_of,
    rms_norm,
)


def expert_ids(w: Weights, routes: list[Tensor]) -> Tensor:
    """Return the ids of the chosen experts layer by layer, [N, layers * chosen], uint8 if they fit, else int32."""
    num_experts = max([router.shape[-1] for router in w.router])
    return torch.cat(routes, dim=-1).to(torch.uint8 if num_experts <= 256 else torch.int32)


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
    hidden, routes = forward(w, shape, rotary, keys, values, batch)
    normed = rms_norm(hidden.index_select(0, picks), w.norm, shape.rms_eps)
    tokens, columns = sample(logits_of(w, shape, normed), rules)
    if "hidden" in rules.outputs:
        columns["hidden"] = half(normed)
    if "routed_experts" in rules.outputs:
        columns["routed_experts"] = expert_ids(w, [chosen.index_select(0, picks) for chosen in routes])
    return tokens, columns


def score_step(
    w: Weights,
    shape: Shape,
    rotary: Rotary,
    keys: Tensor,
    values: Tensor,
    batch: PackedStep,
    following: Tensor,
    outputs: list[str],
    num_top: int,
    block: int,
) -> dict[str, Tensor]:
    """Run the forward pass, and return columns of the distribution after each of the N packed tokens, as `measure` does for the
    tokens `following` [N]. Logits exist for `block` tokens at a time, because [N, vocab] can exceed the memory."""
    hidden, routes = forward(w, shape, rotary, keys, values, batch)
    normed = rms_norm(hidden, w.norm, shape.rms_eps)
    parts: list[dict[str, Tensor]] = []
    for start in range(0, normed.shape[0], block):
        logits = logits_of(w, shape, normed[start : start + block])
        parts.append(measure(logits, following[start : start + block], outputs, num_top))
    columns: dict[str, Tensor] = {}
    for name in parts[0]:
        columns[name] = torch.cat([part[name] for part in parts])
    if "hidden" in outputs:
        columns["hidden"] = half(normed)
    if "routed_experts" in outputs:
        columns["routed_experts"] = expert_ids(w, routes)
    return columns
