"""The forward pass of a decoder over a preallocated key-value cache, for prefill, decode and scoring alike.

Tokens are packed, [N, hidden], without padding; only attention uses a padded [rows, width] layout. Decode is the case
of width 1. A step of a small model costs as much in calls of operators as in arithmetic, and each call releases the
interpreter lock, which a busy event loop may then take. So the forward has few calls: what is the same for all layers
is computed once per step, keys and values are written together, and tensors of the step are changed in place.

Query heads that share a key-value head are placed side by side as extra queries, so that keys and values are never
repeated. The module has no state and does not depend on requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rollmesh.services.inference.engines.torch.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """The weights of one layer, fused and laid out for `x @ w`. A pair of dimensions that is rotated is adjacent, see
    `rotate`."""

    attn_norm: Tensor  # [hidden]
    qkv: Tensor  # [hidden, (heads + 2 * kv_heads) * head_dim]
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim]
    out: Tensor  # [heads * head_dim, hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [hidden, 2 * intermediate]
    down: Tensor  # [intermediate, hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """One whole set of weights."""

    embed: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor  # [hidden]
    head: Tensor  # [hidden, vocab]; a view of `embed` when tied


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedStep:
    """Where each of N packed tokens lies: in the cache and in the padded [num_rows, width] query layout."""

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, absolute
    # [N * 2 * kv_heads] int64, rows of a layer of the cache that a token's keys and then its values are written to.
    cache_rows: Tensor
    queries: Tensor | None  # [N] int64, flat index into [num_rows * width]; None if both layouts are the same
    rows: slice | Tensor  # slots of the cache that the rows attend to: read in place, or gathered by [num_rows] int64
    num_rows: int
    width: int
    kv_len: int  # cache positions attended to, at least the longest sequence in the batch


def empty_cache(spec: ModelSpec, slots: int, context: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [layers, 2, slots, kv_heads, context, head_dim] for keys and values; zeros, because masked garbage could
    be NaN, and 0 * NaN is NaN."""
    size = (spec.num_layers, 2, slots, spec.num_kv_heads, context, spec.head_dim)
    return torch.zeros(size, dtype=dtype, device=device)


def rotary_table(spec: ModelSpec, context_max: int, device: torch.device) -> Tensor:
    """Return exp(i * position * frequency), [context_max, 1, head_dim / 2] complex64 (RoFormer, arXiv:2104.09864)."""
    frequencies = torch.tensor(spec.frequencies, dtype=torch.float32, device=device)
    angles = torch.arange(context_max, dtype=torch.float32, device=device)[:, None, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> None:
    """Apply rotary positions to [N, heads, head_dim] in place: adjacent dimensions are a complex number, times `turns`
    [N, 1, n]."""
    exact = x.float()  # the same tensor in float32
    exact.view(torch.complex64).mul_(turns)
    x.copy_(exact)


def attention_mask(batch: PackedStep, groups: int, dtype: torch.dtype) -> Tensor:
    """Return an additive mask [num_rows, 1, groups * width, kv_len]: a query sees positions up to its own.

    Padding queries get position 0 and thus see one entry: finite, and never read.
    """
    positions = batch.positions
    if batch.queries is not None:
        positions = positions.new_zeros(batch.num_rows * batch.width).index_copy_(0, batch.queries, positions)
    hidden = torch.arange(batch.kv_len, device=positions.device) > positions.view(batch.num_rows, 1, batch.width, 1)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))
    return mask.repeat(1, 1, groups, 1) if batch.width > 1 else mask.expand(-1, -1, groups, -1)


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, batch: PackedStep) -> Tensor:
    """Attention of packed queries [N, heads, head_dim] over [num_rows, kv_heads, kv_len, head_dim], [N, heads *
    head_dim]."""
    num_heads, head_dim, num_kv = q.shape[1], q.shape[2], keys.shape[1]
    groups, rows, width = num_heads // num_kv, batch.num_rows, batch.width
    if batch.queries is not None:
        q = q.new_zeros((rows * width, num_heads, head_dim)).index_copy_(0, batch.queries, q)
    if width == 1:
        mixed = F.scaled_dot_product_attention(q.view(rows, num_kv, groups, head_dim), keys, values, attn_mask=mask)
    else:
        q = q.view(rows, width, num_kv, groups, head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(rows, num_kv, groups * width, head_dim)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        mixed = mixed.view(rows, num_kv, groups, width, head_dim).permute(0, 3, 1, 2, 4)
    mixed = mixed.reshape(rows * width, num_heads * head_dim)
    return mixed if batch.queries is None else mixed.index_select(0, batch.queries)


def forward(w: Weights, spec: ModelSpec, rotary: Tensor, cache: Tensor, batch: PackedStep) -> Tensor:
    """Return hidden states [N, hidden] before the final norm. Writes the tokens' keys and values into `cache`, see
    `empty_cache`."""
    heads, head_dim, eps = spec.num_heads, spec.head_dim, spec.rms_eps
    both, every = heads + spec.num_kv_heads, heads + 2 * spec.num_kv_heads
    turns = rotary.index_select(0, batch.positions)
    mask = attention_mask(batch, heads // spec.num_kv_heads, cache.dtype)
    read = cache[..., : batch.kv_len, :]
    if isinstance(batch.rows, slice):
        read = read[:, :, batch.rows]
    x = F.embedding(batch.tokens, w.embed)
    for layer, written, readable in zip(
        w.layers, cache.view(spec.num_layers, -1, head_dim).unbind(), read.unbind(), strict=True
    ):
        normed = F.rms_norm(x, x.shape[1:], layer.attn_norm, eps)
        qkv = normed @ layer.qkv if layer.qkv_bias is None else torch.addmm(layer.qkv_bias, normed, layer.qkv)
        qkv = qkv.view(-1, every, head_dim)
        qk = qkv[:, :both]
        if layer.qk_norm is not None:
            torch.mul(F.rms_norm(qk, (head_dim,), None, eps), layer.qk_norm, out=qk)
        rotate(qk, turns)
        written.index_copy_(0, batch.cache_rows, qkv[:, heads:].reshape(-1, head_dim))
        keys, values = readable.unbind()
        if isinstance(batch.rows, Tensor):
            keys, values = keys.index_select(0, batch.rows), values.index_select(0, batch.rows)
        x.addmm_(attend(qkv[:, :heads], keys, values, mask, batch), layer.out)
        gate, up = (F.rms_norm(x, x.shape[1:], layer.mlp_norm, eps) @ layer.gate_up).chunk(2, dim=1)
        x.addmm_(F.silu(gate).mul_(up), layer.down)
    return x
