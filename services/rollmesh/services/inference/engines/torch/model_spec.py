"""Describe a decoder that the built-in forward pass computes, from the model's transformers configuration.

It has the shape of Llama (Mistral without a window is one), Qwen2 or Qwen3. Everything else is rejected with
`UnknownToDecoder`, and the engine then runs the model through transformers. A field that this module does not read may
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

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class UnknownToDecoder(ValueError):
    """The built-in forward pass does not compute this model."""


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
    tied: bool
    qk_norm: bool
    """Queries and keys are normalized per head."""
    qkv_bias: bool
    """Query, key and value projections have a bias."""
    frequencies: tuple[float, ...]
    """Angle per position of each pair of dimensions of a head."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of the state dict, by its transformers name."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes().items()}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        width, heads, kv_heads = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        rows = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        shapes: dict[str, tuple[int, ...]] = {"self_attn.o_proj.weight": (width, heads)}
        shapes |= {f"self_attn.{name}.weight": (num, width) for name, num in rows.items()}
        if self.qkv_bias:
            shapes |= {f"self_attn.{name}.bias": (num,) for name, num in rows.items()}
        if self.qk_norm:
            shapes |= {f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        shapes |= {f"mlp.{name}.weight": (self.intermediate_size, width) for name in ("gate_proj", "up_proj")}
        shapes["mlp.down_proj.weight"] = (width, self.intermediate_size)
        return shapes | {f"{name}.weight": (width,) for name in ("input_layernorm", "post_attention_layernorm")}


def read_config(folder: Path) -> Any:
    """Read the transformers configuration in a folder. Raises ValueError naming the folder and the cause."""
    try:
        return AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except CONFIG_ERRORS as error:
        raise ValueError(f"model {folder}: config.json cannot be read: {one_line(error)}") from error


def model_spec(config: Any) -> ModelSpec:
    """Describe the decoder of a transformers configuration. Raises UnknownToDecoder naming the unknown field or
    value."""
    if config.model_type not in _FAMILIES:
        raise UnknownToDecoder(f"model_type {config.model_type!r} is not one of {', '.join(_FAMILIES)}")
    rope = config.rope_parameters
    every_layer = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    windows = set(getattr(config, "layer_types", None) or (every_layer,)) - {"full_attention"}
    rejected = {
        "hidden_act": config.hidden_act if config.hidden_act != "silu" else None,
        "mlp_bias": getattr(config, "mlp_bias", None) or None,
        "attention_bias": getattr(config, "attention_bias", None) or None,
        "layer_types": min(windows, default=None),
        "rope_type": rope["rope_type"] if rope["rope_type"] not in ("default", "llama3") else None,
        "partial_rotary_factor": rope.get("partial_rotary_factor"),
        "quantization_config": getattr(config, "quantization_config", None),
    }
    for name, value in rejected.items():
        if value is not None:
            raise UnknownToDecoder(f"this value of {name} is not known: {value!r}")
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return ModelSpec(
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        intermediate_size=int(config.intermediate_size),
        rms_eps=float(config.rms_norm_eps),
        tied=bool(config.tie_word_embeddings),
        qk_norm=config.model_type == "qwen3",
        qkv_bias=config.model_type == "qwen2",
        frequencies=_frequencies(config, head_dim),
    )


def _frequencies(config: Any, head_dim: int) -> tuple[float, ...]:
    """Return angles per position (RoFormer, arXiv:2104.09864), with `llama3` those that Llama 3.1 scales for its long
    context."""
    if config.rope_parameters["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
        return tuple(scaled.tolist())
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return tuple((1.0 / config.rope_parameters["rope_theta"] ** steps).tolist())
