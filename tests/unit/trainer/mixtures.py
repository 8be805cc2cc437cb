"""Tiny mixture-of-experts models for tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

EXPERTS = 4
TOP_K = 2


def tiny_mixture(model_type: str = "qwen3_moe", **changes: Any) -> PreTrainedModel:
    """Return a model with random weights, whose routers are far from even, in evaluation mode."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "initializer_range": 0.1,
        "sliding_window": None,
    }
    make: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = make(CONFIG_MAPPING[model_type](**(sizes | changes)), dtype=torch.float32)
    made: PreTrainedModel = model.eval()
    return made
