"""The forward pass of a decoder over a preallocated key-value cache, for prefill, decode and scoring alike.

Tokens are packed, [N, hidden], without padding; only attention uses a padded [rows, width] layout. Decode is the case of width 1.
The functions are tensor code in the subset that TorchScript compiles. One call per step releases the interpreter lock once per
step, so that a busy event loop in the same process does not delay the model.

Query heads that share a key-value head are placed side by side as extra queries, so that keys and values are never repeated.
The module has no state and does not depend on requests. Annotations are evaluated (no `from __future__ import annotations`):
TorchScript resolves them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rollmesh.services.inference.engines.torch.model_spec import ModelSpec

class Weights(NamedTuple):
    """One whole set of weights, fused and laid out for `x @ w`. Lists are per layer; an empty list means absent."""

    embed: Tensor  # [vocab, hidden]
    head: Tensor  # [hidden, vocab]; a view of `embed` when tied
    norm: Tensor  # [hidden]
    attn_norm: list[Tensor]  # [hidden]
    qkv: list[Tensor]  # [hidden, (heads + 2 * kv_heads) * head_dim]
    qkv_bias: list[Tensor]
    qk_norm: list[Tensor]  # [heads + kv_heads, head_dim]
    out: list[Tensor]  # [heads * head_dim, hidden]
    out_bias: list[Tensor]
    attn_post_norm: list[Tensor]  # [hidden]
    mlp_norm: list[Tensor]  # [hidden]
    gate_up: list[Tensor]  # [hidden, 2 * intermediate]; of the shared expert in a layer with experts
    down: list[Tensor]  # [intermediate, hidden]
    mlp_post_norm: list[Tensor]  # [hidden]
    router: list[Tensor]  # [hidden, experts]; no numbers in a layer without experts
    expert_gate_up: list[Tensor]  # [experts, hidden, 2 * intermediate]
    expert_down: list[Tensor]  # [experts, intermediate, hidden]
    shared_gate: list[Tensor]  # [hidden, 1]; no numbers without a shared expert


class Shape(NamedTuple):
    """What the forward pass must know beside the tensors. See `ModelSpec` for the meaning."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    layer_kinds: list[int]
    windows: list[int]  # per kind; 0 sees everything
    gelu: bool
    num_chosen: int
    normalized: bool
    embed_scale: float
    attn_scale: float
    attn_softcap: float  # 0: none
    logit_divisor: float
    logit_softcap: float  # 0: none


class Rotary(NamedTuple):
    """Tables [context_max, 1, head_dim] per kind of layer, float32; the sine of the first half is negated, see `rotate`."""

    cos: list[Tensor]
    sin: list[Tensor]


class PackedStep(NamedTuple):
    """Where each of N packed tokens lies: in the cache and in the padded [num_rows, width] query layout."""

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, absolute
    slots: Tensor  # [N] int64, cache slot the token is written to
    queries: Tensor  # [N] int64, flat index into [num_rows * width]
    rows: Tensor  # [num_rows] int64, cache slot each row attends to; unused when `first_slot` >= 0
    first_slot: int  # rows are the slots first_slot .. first_slot + num_rows, read in place; -1: gathered by `rows`
    num_rows: int
    width: int
    kv_len: int  # cache positions attended to, at least the longest sequence in the batch
    packed: bool  # the padded layout is the packed one: nothing to scatter


def rotary_table(
    frequencies: list[float], magnitude: float, head_dim: int, context_max: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * frequency in the half-split layout (RoFormer, arXiv:2104.09864).

    Dimensions without a frequency are not rotated: they lie at the end of each half (see `weight_layout`).
    """
    angles = torch.arange(context_max, dtype=torch.float32, device=device)[:, None] * torch.tensor(
        frequencies, dtype=torch.float32, device=device
    )
    rest = head_dim // 2 - len(frequencies)
    cos, sin = F.pad(angles.cos() * magnitude, [0, rest], value=1.0), F.pad(angles.sin() * magnitude, [0, rest])
    return torch.cat((cos, cos), dim=1)[:, None], torch.cat((-sin, sin), dim=1)[:, None]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, the norm taken in float32.

    sqrt(sum + n eps) = hypot(norm, sqrt(n eps)): half the passes over x of the textbook form.
    """
    n = float(x.shape[-1])
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = math.sqrt(n) / torch.hypot(norm, torch.full_like(norm, math.sqrt(n * eps)))
    return x * scale.to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on [N, heads, head_dim] with tables [N, 1, head_dim]: halves swapped, signs in the table."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, torch.cat((x[:, :, half:], x[:, :, :half]), dim=-1), sin)


def attention_mask(batch: PackedStep, window: int, groups: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [num_rows, 1, groups * width, kv_len]: a query sees positions up to its own, at most `window` of them.

    Padding queries get position 0 and thus see one entry: finite, and never read.
    """
    positions = batch.positions
    if not batch.packed:
        positions = torch.zeros(batch.num_rows * batch.width, dtype=torch.int64, device=positions.device).index_copy(
            0, batch.queries, positions
        )
    positions = positions.view(batch.num_rows, 1, batch.width, 1)
    columns = torch.arange(batch.kv_len, device=positions.device)
    hidden = columns > positions
    if window > 0:
        hidden = hidden | (columns <= positions - window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill(hidden, float("-inf"))
    if groups > 1 and batch.width > 1:
        return mask.repeat(1, 1, groups, 1)
    return mask.expand(batch.num_rows, 1, groups * batch.width, batch.kv_len)


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, batch: PackedStep, shape: Shape) -> Tensor:
    """Attention of packed queries [N, heads, head_dim] over cache layers [slots, kv_heads, context, head_dim]."""
    num_heads, head_dim, num_kv = q.shape[1], q.shape[2], keys.shape[1]
    groups = num_heads // num_kv
    if not batch.packed:
        padded = torch.zeros((batch.num_rows * batch.width, num_heads, head_dim), dtype=q.dtype, device=q.device)
        q = padded.index_copy(0, batch.queries, q)
    if batch.first_slot >= 0:
        keys = keys.narrow(0, batch.first_slot, batch.num_rows)[:, :, : batch.kv_len]
        values = values.narrow(0, batch.first_slot, batch.num_rows)[:, :, : batch.kv_len]
    else:
        keys = keys[:, :, : batch.kv_len].index_select(0, batch.rows)
        values = values[:, :, : batch.kv_len].index_select(0, batch.rows)
    q = q.view(batch.num_rows, batch.width, num_kv, groups, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch.num_rows, num_kv, groups * batch.width, head_dim)
    if shape.attn_softcap > 0:
        scores = torch.matmul(q, keys.transpose(2, 3)) * (shape.attn_scale / shape.attn_softcap)
        scores = torch.tanh(scores) * shape.attn_softcap + mask
        mixed = torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), values)
    else:
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=shape.attn_scale)
    mixed = mixed.view(batch.num_rows, num_kv, groups, batch.width, head_dim).permute(0, 3, 1, 2, 4)
    mixed = mixed.reshape(batch.num_rows * batch.width, num_heads * head_dim)
    return mixed if batch.packed else mixed.index_select(0, batch.queries)


def write_cache(cache: Tensor, x: Tensor, index: Tensor) -> None:
    """Store [N, kv_heads, head_dim] at flat cache rows `index` [N * kv_heads]."""
    cache.view(-1, x.shape[-1]).index_copy_(0, index, x.reshape(-1, x.shape[-1]))


def gated(gate_up: Tensor, gelu: bool) -> Tensor:
    """Activation of the first half times the second half, [N, 2 * intermediate] to [N, intermediate]."""
    half = gate_up.shape[1] // 2
    gate = F.gelu(gate_up[:, :half], approximate="tanh") if gelu else F.silu(gate_up[:, :half])
    return gate * gate_up[:, half:]


def chosen_experts(w: Weights, shape: Shape, x: Tensor, layer: int, routes: list[Tensor]) -> Tensor:
    """Weighted sum of the experts that the router chooses for each token, [N, hidden]. Appends their ids [N, chosen] to `routes`."""
    weights, chosen = torch.softmax(torch.mm(x, w.router[layer]).float(), dim=-1).topk(shape.num_chosen, dim=-1)
    if shape.normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    routes.append(chosen)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts: list[int] = torch.bincount(flat, minlength=w.router[layer].shape[1]).tolist()
    result = torch.zeros_like(x)
    start = 0
    for expert in range(len(counts)):
        count = counts[expert]
        if count > 0:
            picks = order[start : start + count]
            tokens = torch.div(picks, shape.num_chosen, rounding_mode="floor")
            hidden = gated(torch.mm(x.index_select(0, tokens), w.expert_gate_up[layer][expert]), shape.gelu)
            scale = weights.flatten().index_select(0, picks)[:, None].to(x.dtype)
            result.index_add_(0, tokens, torch.mm(hidden, w.expert_down[layer][expert]) * scale)
            start += count
    return result


def feed_forward(w: Weights, shape: Shape, x: Tensor, layer: int, routes: list[Tensor]) -> Tensor:
    """The feed-forward of a layer, dense or with experts, [N, hidden]."""
    if len(w.router) == 0 or w.router[layer].numel() == 0:
        return torch.mm(gated(torch.mm(x, w.gate_up[layer]), shape.gelu), w.down[layer])
    result = chosen_experts(w, shape, x, layer, routes)
    if w.shared_gate[layer].numel() > 0:
        shared = torch.mm(gated(torch.mm(x, w.gate_up[layer]), shape.gelu), w.down[layer])
        result = result + torch.sigmoid(torch.mm(x, w.shared_gate[layer])) * shared
    return result


def forward(
    w: Weights, shape: Shape, rotary: Rotary, keys: Tensor, values: Tensor, batch: PackedStep
) -> tuple[Tensor, list[Tensor]]:
    """Hidden states [N, hidden] before the final norm, and the ids [N, chosen] of the experts of each layer that has some.

    Writes the tokens' keys and values into the cache, `keys` and `values` [layers, slots, kv_heads, context_max, head_dim].
    """
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    both = heads + kv_heads
    context = keys.shape[3]
    head_rows = torch.arange(kv_heads, device=keys.device) * context
    index = (batch.slots * (kv_heads * context) + batch.positions)[:, None] + head_rows
    index = index.view(-1)
    cos = [table.index_select(0, batch.positions).to(keys.dtype) for table in rotary.cos]
    sin = [table.index_select(0, batch.positions).to(keys.dtype) for table in rotary.sin]
    masks = [attention_mask(batch, window, heads // kv_heads, keys.dtype) for window in shape.windows]
    routes: list[Tensor] = []
    x = F.embedding(batch.tokens, w.embed)
    if shape.embed_scale != 1.0:
        x = x * shape.embed_scale
    for layer in range(len(w.qkv)):
        kind = shape.layer_kinds[layer]
        qkv = torch.mm(rms_norm(x, w.attn_norm[layer], shape.rms_eps), w.qkv[layer])
        if len(w.qkv_bias) > 0:
            qkv = qkv + w.qkv_bias[layer]
        qkv = qkv.view(-1, both + kv_heads, shape.head_dim)
        qk = qkv[:, :both]
        if len(w.qk_norm) > 0:
            qk = rms_norm(qk, w.qk_norm[layer], shape.rms_eps)
        qk = rotate(qk, cos[kind], sin[kind])
        write_cache(keys[layer], qk[:, heads:], index)
        write_cache(values[layer], qkv[:, both:], index)
        mixed = attend(qk[:, :heads], keys[layer], values[layer], masks[kind], batch, shape)
        if len(w.attn_post_norm) > 0:
            x = x + rms_norm(torch.mm(mixed, w.out[layer]), w.attn_post_norm[layer], shape.rms_eps)
        else:
            x = torch.addmm(x, mixed, w.out[layer])
        if len(w.out_bias) > 0:
            x = x + w.out_bias[layer]
        normed = rms_norm(x, w.mlp_norm[layer], shape.rms_eps)
        if len(w.mlp_post_norm) > 0:
            x = x + rms_norm(feed_forward(w, shape, normed, layer, routes), w.mlp_post_norm[layer], shape.rms_eps)
        elif len(w.router) > 0:
            x = x + feed_forward(w, shape, normed, layer, routes)
        else:
            x = torch.addmm(x, gated(torch.mm(normed, w.gate_up[layer]), shape.gelu), w.down[layer])
    return x, routes


def logits_of(w: Weights, shape: Shape, normed: Tensor) -> Tensor:
    """Hidden states [M, hidden] after the final norm to logits [M, vocab] float32."""
    logits = torch.mm(normed, w.head).float()
    if shape.logit_divisor != 1.0:
        logits = logits / shape.logit_divisor
    if shape.logit_softcap > 0:
        logits = torch.tanh(logits / shape.logit_softcap) * shape.logit_softcap
    return logits
