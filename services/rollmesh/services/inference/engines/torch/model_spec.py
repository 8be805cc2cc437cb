"""Describe a decoder that the built-in forward pass computes, from the model's transformers configuration.

A family (`_FAMILIES`) has the constants that its code fixes. The fields of the configuration have the rest. Everything else is
rejected with `UnknownToDecoder`, and the engine then runs the model through transformers. A field that this module does not read may
still change the result of transformers, so the engine compares both before it serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rollmesh.trainer.model_config import CONFIG_ERRORS, one_line

_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_FULL, _SLIDING = "full_attention", "sliding_attention"


class UnknownToDecoder(ValueError):
    """The built-in forward pass does not compute this model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Constants that the code of a family fixes."""

    qkv_bias: bool = False
    """Query, key and value projections have a bias, independent of `attention_bias`."""
    qk_norm: bool = False
    """Queries and keys are normalized per head."""
    norm_offset: float = 0.0
    """Norms multiply by this plus their weight."""
    sandwich: bool = False
    """The outputs of attention and feed-forward are normalized before they are added."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    softcap: bool = False
    """Attention scores are capped by `attn_logit_softcapping`."""
    fused: bool = False
    """Query, key and value are one tensor, gate and up another."""
    experts: str = ""
    """Field with the number of experts; empty without experts."""
    expert_size: str = "moe_intermediate_size"
    """Field with the intermediate size of an expert."""
    shared_size: str = ""
    """Field with the intermediate size of the expert that every token takes; empty without one."""
    normalized_experts: bool = False
    """The weights of the chosen experts add up to 1, independent of `norm_topk_prob`."""


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "ministral": _Family(),
    "smollm3": _Family(),
    "granite": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "phi3": _Family(fused=True),
    "gemma": _Family(norm_offset=1.0, scaled_embedding=True),
    "gemma2": _Family(norm_offset=1.0, scaled_embedding=True, sandwich=True, softcap=True),
    "gemma3_text": _Family(norm_offset=1.0, scaled_embedding=True, sandwich=True, qk_norm=True),
    "mixtral": _Family(experts="num_local_experts", expert_size="intermediate_size", normalized_experts=True),
    "qwen2_moe": _Family(qkv_bias=True, experts="num_experts", shared_size="shared_expert_intermediate_size"),
    "qwen3_moe": _Family(qk_norm=True, experts="num_experts"),
}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Properties that differ between layers of one model: attention window and rotation."""

    window: int
    """Number of positions that a query attends to, including its own; 0 means all before it."""
    frequencies: tuple[float, ...]
    """Angle per position of each rotated pair of dimensions; empty without rotation."""
    magnitude: float
    """Factor of the rotated dimensions (attention factor of scaled rotary positions)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Feed-forward layers of which a router chooses some per token."""

    num: int
    num_chosen: int
    normalized: bool
    intermediate_size: int
    shared_size: int
    """Intermediate size of the expert that every token takes, behind a sigmoid gate; 0 without one."""
    sparse: tuple[bool, ...]
    """Layers that have experts; the others have the dense feed-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of one decoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Dimensions of a head that are rotated, the first ones."""
    intermediate_size: int
    rms_eps: float
    positions_max: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    activation: str
    kinds: tuple[LayerKind, ...]
    layer_kinds: tuple[int, ...]
    """Per layer, its index in `kinds`."""
    norm_offset: float = 0.0
    sandwich: bool = False
    fused: bool = False
    experts: Experts | None = None
    embed_scale: float = 1.0
    attn_scale: float
    attn_softcap: float = 0.0
    residual_scale: float = 1.0
    """Factor of the output of a layer before it is added."""
    logit_divisor: float = 1.0
    logit_softcap: float = 0.0

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and self.experts.sparse[layer]

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the state dict, by its transformers name."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            parts = self._attention_shapes() | self._norm_shapes() | self._feed_forward_shapes(layer)
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _attention_shapes(self) -> dict[str, tuple[int, ...]]:
        width, heads, kv_heads = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        if self.fused:
            rows = {"qkv_proj": heads + 2 * kv_heads}
        shapes: dict[str, tuple[int, ...]] = {"self_attn.o_proj.weight": (width, heads)}
        shapes |= {f"self_attn.{name}.weight": (num, width) for name, num in rows.items()}
        if self.qkv_bias:
            shapes |= {f"self_attn.{name}.bias": (num,) for name, num in rows.items()}
        if self.out_bias:
            shapes["self_attn.o_proj.bias"] = (width,)
        if self.qk_norm:
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        return shapes

    def _norm_shapes(self) -> dict[str, tuple[int, ...]]:
        names = ["input_layernorm", "post_attention_layernorm"]
        if self.sandwich:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        return {f"{name}.weight": (self.hidden_size,) for name in names}

    def _feed_forward_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        width = self.hidden_size
        if self.experts is None or not self.experts.sparse[layer]:
            return _dense_shapes("mlp", width, self.intermediate_size, self.fused)
        experts = self.experts
        shapes: dict[str, tuple[int, ...]] = {
            "mlp.gate.weight": (experts.num, width),
            "mlp.experts.gate_up_proj": (experts.num, 2 * experts.intermediate_size, width),
            "mlp.experts.down_proj": (experts.num, width, experts.intermediate_size),
        }
        if experts.shared_size:
            shapes |= _dense_shapes("mlp.shared_expert", width, experts.shared_size, fused=False)
            shapes["mlp.shared_expert_gate.weight"] = (1, width)
        return shapes


def _dense_shapes(name: str, width: int, size: int, fused: bool) -> dict[str, tuple[int, ...]]:
    rows = {"gate_up_proj": 2 * size} if fused else {"gate_proj": size, "up_proj": size}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.{part}.weight": (num, width) for part, num in rows.items()}
    return {**shapes, f"{name}.down_proj.weight": (width, size)}


def read_config(folder: Path) -> Any:
    """Read the transformers configuration in a folder. Raises ValueError naming the folder and the cause."""
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except CONFIG_ERRORS as error:
        raise ValueError(f"model {folder}: config.json cannot be read: {one_line(error)}") from error


def model_spec(config: Any) -> ModelSpec:
    """Describe the decoder of a transformers configuration. Raises UnknownToDecoder naming the unknown field or value."""
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise UnknownToDecoder(f"model_type {config.model_type!r} is not one of {', '.join(_FAMILIES)}")
    activation = str(getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", "silu"))
    rejected = {
        "hidden_act": activation if activation not in _ACTIVATIONS else None,
        "mlp_bias": getattr(config, "mlp_bias", None) or None,
        "use_bidirectional_attention": getattr(config, "use_bidirectional_attention", None) or None,
        "quantization_config": getattr(config, "quantization_config", None),
    }
    for name, value in rejected.items():
        if value is not None:
            raise UnknownToDecoder(f"this value of {name} is not known: {value!r}")
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    kinds, layer_kinds = _layer_kinds(config, head_dim)
    bias = bool(getattr(config, "attention_bias", False))
    query_scale = getattr(config, "query_pre_attn_scalar", None) or head_dim
    return ModelSpec(
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        rotary_dim=2 * max(len(kind.frequencies) for kind in kinds),
        intermediate_size=int(config.intermediate_size),
        rms_eps=float(config.rms_norm_eps),
        positions_max=int(config.max_position_embeddings),
        tied=bool(config.tie_word_embeddings),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or bias,
        out_bias=bias and not family.qkv_bias,
        activation=activation,
        kinds=kinds,
        layer_kinds=layer_kinds,
        norm_offset=family.norm_offset,
        sandwich=family.sandwich,
        fused=family.fused,
        experts=_experts(config, family) if family.experts else None,
        embed_scale=config.hidden_size**0.5
        if family.scaled_embedding
        else getattr(config, "embedding_multiplier", 1.0),
        attn_scale=float(getattr(config, "attention_multiplier", query_scale**-0.5)),
        attn_softcap=float(config.attn_logit_softcapping or 0.0) if family.softcap else 0.0,
        residual_scale=float(getattr(config, "residual_multiplier", 1.0)),
        logit_divisor=float(getattr(config, "logits_scaling", 1.0)),
        logit_softcap=float(getattr(config, "final_logit_softcapping", None) or 0.0),
    )


def _experts(config: Any, family: _Family) -> Experts:
    num, layers = int(getattr(config, family.experts)), int(config.num_hidden_layers)
    dense, every = getattr(config, "mlp_only_layers", None) or (), int(getattr(config, "decoder_sparse_step", 1))
    return Experts(
        num=num,
        num_chosen=int(config.num_experts_per_tok),
        normalized=family.normalized_experts or bool(config.norm_topk_prob),
        intermediate_size=int(getattr(config, family.expert_size)),
        shared_size=int(getattr(config, family.shared_size)) if family.shared_size else 0,
        sparse=tuple(num > 0 and layer not in dense and (layer + 1) % every == 0 for layer in range(layers)),
    )


def _layer_kinds(config: Any, head_dim: int) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    num = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None) or 0
    types: Sequence[str] = getattr(config, "layer_types", None) or [_SLIDING if window else _FULL] * num
    rotated = getattr(config, "no_rope_layers", None) or [1] * num
    if unknown := set(types) - {_FULL, _SLIDING}:
        raise UnknownToDecoder(f"this value of layer_types is not known: {min(unknown)!r}")
    kinds: list[LayerKind] = []
    order: list[int] = []
    for layer_type, has_rope in zip(types, rotated, strict=True):
        frequencies, magnitude = _frequencies(config, layer_type, head_dim) if has_rope else ((), 1.0)
        kind = LayerKind(int(window) if layer_type == _SLIDING else 0, frequencies, magnitude)
        if kind not in kinds:
            kinds.append(kind)
        order.append(kinds.index(kind))
    return tuple(kinds), tuple(order)


def _frequencies(config: Any, layer_type: str, head_dim: int) -> tuple[tuple[float, ...], float]:
    """Return angles per position and the attention factor (RoFormer, arXiv:2104.09864, and its scaled variants).

    The variants `dynamic` and `longrope` depend on the length of a sequence beyond the original context. These are the values
    within it, and `positions.length_limit` keeps sequences there.
    """
    parameters, where = config.rope_parameters, None
    if layer_type in parameters:
        parameters, where = parameters[layer_type], layer_type
    rope_type = parameters["rope_type"]
    if rope_type == "default":
        dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        steps = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return tuple((1.0 / parameters["rope_theta"] ** steps).tolist()), 1.0
    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise UnknownToDecoder(f"this value of rope_type is not known: {rope_type!r}")
    inverse, magnitude = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", layer_type=where)
    return tuple(inverse.tolist()), float(magnitude)
