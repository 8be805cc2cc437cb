"""The demo's model, made on the spot: a Qwen3 of about 0.36 million parameters over the character tokenizer.

A plain transformers configuration, so that every engine and tool that knows Qwen3 loads it; nothing is downloaded.
Collaborators: `tokenizer` (vocabulary), `model_files` (writing the folder).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollmesh.demo.tokenizer import END, PAD, SPECIAL_TOKENS, VOCAB_SIZE
from rollmesh.shared.settings import PositiveFloat, PositiveInt, Settings


class TinyModelConfig(Settings):
    """Shape of the tiny model. The defaults make 359,168 parameters."""

    hidden_size: PositiveInt = 128
    """Width. 64 trains twice as fast but rises less under RL."""
    num_layers: PositiveInt = 2
    """Depth; two are needed to copy from the context (an induction head spans two layers)."""
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    """Per head; 32 is a size that flash-attention kernels accept."""
    intermediate_size: PositiveInt = 320
    context_max: PositiveInt = 512
    """Most tokens of a sequence."""
    rope_theta: PositiveFloat = 1e4

    def check_fields(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_heads` must be a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_heads}"
            )


def build_tiny_model(config: TinyModelConfig, *, seed: int) -> PreTrainedModel:
    """A freshly initialised float32 model on the CPU; the same seed gives the same weights. Global RNG is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = Qwen3ForCausalLM(_transformers_config(config))  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = SPECIAL_TOKENS.index(END)
    model.generation_config.pad_token_id = SPECIAL_TOKENS.index(PAD)
    return model


def _transformers_config(config: TinyModelConfig) -> Qwen3Config:
    # Through a dict: transformers 5 declares `rope_parameters` and takes `rope_theta` as a legacy name, 4.x knows only that.
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.context_max,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "eos_token_id": SPECIAL_TOKENS.index(END),
        "dtype": "float32",
    }
    return Qwen3Config(**fields)
