"""The shape of a decoder, read from a checkpoint's `config.json` without importing transformers.

Covers the Llama family with grouped-query attention and rotary positions: llama, mistral without sliding window, qwen2,
qwen3. What the engine would compute wrongly is refused here, by name, rather than approximated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes and switches of one decoder."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope_theta: float
    positions_max: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the state dict, under its transformers name."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes().items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        width, heads, kv_heads = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (width,)}
        for name, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            shapes[f"self_attn.{name}.weight"] = (rows, width)
            if self.qkv_bias:
                shapes[f"self_attn.{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        shapes["self_attn.o_proj.weight"] = (width, heads)
        if self.out_bias:
            shapes["self_attn.o_proj.bias"] = (width,)
        shapes |= {
            "post_attention_layernorm.weight": (width,),
            "mlp.gate_proj.weight": (self.intermediate_size, width),
            "mlp.up_proj.weight": (self.intermediate_size, width),
            "mlp.down_proj.weight": (width, self.intermediate_size),
        }
        return shapes


def read_model_spec(folder: Path) -> ModelSpec:
    """Raises ValueError naming the folder and what is missing or not supported."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model {folder}: config.json cannot be read: {error}") from error
    try:
        _refuse_unsupported(config)
        return _spec(config)
    except KeyError as error:
        raise ValueError(f"model {folder}: config.json has no field {error}") from error
    except ValueError as error:
        raise ValueError(f"model {folder}: {error}") from error


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config["model_type"] not in _FAMILIES:
        raise ValueError(f"model_type {config['model_type']!r} is not one of {', '.join(_FAMILIES)}")
    rope = _rope(config)
    sliding = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    refused = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "sliding_window": sliding and config["model_type"] in ("mistral", "qwen2", "qwen3"),
        "rope_type": rope.get("rope_type", rope.get("type", "default")) != "default",
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "quantization_config": "quantization_config" in config,
    }
    for name, bad in refused.items():
        if bad:
            raise ValueError(f"this value of {name} is not supported: {rope.get(name, config.get(name))!r}")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(config.get("rope_parameters") or config.get("rope_scaling") or {})


def _spec(config: Mapping[str, Any]) -> ModelSpec:
    heads = int(config["num_attention_heads"])
    bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        intermediate_size=int(config["intermediate_size"]),
        rms_eps=float(config["rms_norm_eps"]),
        rope_theta=float(_rope(config).get("rope_theta", config.get("rope_theta", 10000.0))),
        positions_max=int(config["max_position_embeddings"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        qk_norm=config["model_type"] == "qwen3",
        qkv_bias=bias or config["model_type"] == "qwen2",
        out_bias=bias and config["model_type"] != "qwen2",
    )
