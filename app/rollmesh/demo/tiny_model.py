"""The model of the demo: a Qwen3 of about 0.36 million parameters over the character tokenizer, made without a
download.

It is a plain transformers configuration, so every engine and tool that supports Qwen3 loads it.
Collaborators: `tokenizer` (vocabulary), `model_files` (writes the folder).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollmesh.demo.tokenizer import END, PAD, SPECIAL_TOKENS, VOCAB_SIZE
from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings


class TinyModelConfig(Settings):
    """Shape of the tiny model. The defaults make 359,168 parameters."""

    hidden_size: PositiveInt = 128
    """Width. 64 trains twice as fast, but RL improves it less."""
    num_layers: PositiveInt = 2
    """Depth. Copying from the context needs two layers, because an induction head spans two."""
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    """Width per head. Flash-attention kernels support 32."""
    intermediate_size: PositiveInt = 320
    context_max: PositiveInt = 512
    """Maximum number of tokens of a sequence."""
    rope_theta: PositiveFloat = 1e4

    def check_fields(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_heads` must be a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_heads}"
            )


def build_tiny_model(config: TinyModelConfig, *, seed: int) -> PreTrainedModel:
    """Return a newly initialized float32 model on the CPU. The same seed gives the same weights. The global RNG does
    not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = Qwen3ForCausalLM(_transformers_config(config))  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = SPECIAL_TOKENS.index(END)
    model.generation_config.pad_token_id = SPECIAL_TOKENS.index(PAD)
    return model


def _transformers_config(config: TinyModelConfig) -> Qwen3Config:
    # By a dict, because transformers 5 declares `rope_parameters` and accepts `rope_theta` as a legacy name, and 4.x
    # has only that.
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
