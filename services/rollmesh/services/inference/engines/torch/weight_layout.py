"""Check a state dict and lay it out for the built-in forward pass: `x @ w`, fused projections, rotated pairs side by
side.

Collaborators: `model_spec` names the tensors, `model.Weights` is the result, `common.weights_buffer` reads the files.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.services.inference.engines.torch.model import LayerWeights, Weights
from rollmesh.services.inference.engines.torch.model_spec import ModelSpec

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def lay_out(spec: ModelSpec, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Weights:
    """Return the weights of a whole state dict. Raises WeightsMismatch naming the first tensor that does not fit."""
    state = dict(state)
    _check(spec, state)
    return fuse(spec, {name: tensor.to(device=device, dtype=dtype) for name, tensor in state.items()})


def _check(spec: ModelSpec, state: dict[str, Tensor]) -> None:
    expected = spec.tensor_shapes()
    if spec.tied and HEAD in state:
        _check_tied(state)
    for name, shape in expected.items():
        if name not in state:
            raise WeightsMismatch(f"tensor {name} is missing: send the whole state dict under its transformers names")
        _check_tensor(name, state[name], shape)
    for name in state:
        if name not in expected:
            raise WeightsMismatch(
                f"tensor {name} does not belong to this model: send weights of the configured model only"
            )


def _check_tied(state: dict[str, Tensor]) -> None:
    """Remove a tied head, which is redundant. Reject one that differs from the embedding, because it would be
    ignored."""
    head = state.pop(HEAD)
    if EMBED in state and not torch.equal(head, state[EMBED]):
        raise WeightsMismatch(
            f"tensor {HEAD} differs from {EMBED}, but config.json ties them: send them equal or untie the config"
        )


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise WeightsMismatch(
            f"tensor {name} has shape {list(tensor.shape)}, the model needs {list(shape)}: is this the configured "
            "model?"
        )

    if not tensor.is_floating_point():
        raise WeightsMismatch(f"tensor {name} has dtype {tensor.dtype}: send float32, bfloat16 or float16")


def fuse(spec: ModelSpec, state: Mapping[str, Tensor]) -> Weights:
    """Fuse query, key and value to one matrix, and gate and up to another, per layer. A tied head is a view of the
    embedding."""
    embed = state[EMBED].clone()
    return Weights(
        embed=embed,
        layers=[_layer(spec, state, f"model.layers.{layer}.") for layer in range(spec.num_layers)],
        norm=state["model.norm.weight"].clone(),
        head=(embed if spec.tied else state[HEAD].clone()).t(),
    )


def _layer(spec: ModelSpec, state: Mapping[str, Tensor], prefix: str) -> LayerWeights:
    attn, mlp, heads, kv_heads = f"{prefix}self_attn.", f"{prefix}mlp.", spec.num_heads, spec.num_kv_heads
    # transformers rotates dimension i with i + head_dim / 2. Attention scores do not depend on the order of the
    # dimensions.
    pairs = torch.arange(spec.head_dim).view(2, -1).t().flatten()

    def qkv(kind: str) -> Tensor:
        rows = torch.cat([state[f"{attn}{name}.{kind}"] for name in ("q_proj", "k_proj", "v_proj")])
        parts = rows.view(-1, spec.head_dim, *rows.shape[1:])
        both = heads + kv_heads
        return torch.cat((parts[:both][:, pairs], parts[both:])).flatten(0, 1)

    def qk_norm() -> Tensor:
        q, k = state[f"{attn}q_norm.weight"][pairs], state[f"{attn}k_norm.weight"][pairs]
        return torch.cat((q.expand(heads, -1), k.expand(kv_heads, -1)))

    return LayerWeights(
        attn_norm=state[f"{prefix}input_layernorm.weight"].clone(),
        qkv=qkv("weight").t().contiguous(),
        qkv_bias=qkv("bias") if spec.qkv_bias else None,
        qk_norm=qk_norm() if spec.qk_norm else None,
        out=state[f"{attn}o_proj.weight"].t().contiguous(),
        mlp_norm=state[f"{prefix}post_attention_layernorm.weight"].clone(),
        gate_up=torch.cat([state[f"{mlp}{name}.weight"] for name in ("gate_proj", "up_proj")]).t().contiguous(),
        down=state[f"{mlp}down_proj.weight"].t().contiguous(),
    )
