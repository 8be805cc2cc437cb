"""Tiny mixture-of-experts models for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from rollmesh.shared.domain.trajectory import Source, TrainingSample

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


def recorded(sample: TrainingSample, rng: np.random.Generator) -> TrainingSample:
    """Return the sample with random records of the experts of its sampled tokens, for `tiny_mixture()`."""
    segments = []
    for segment in sample.segments:
        if segment.source is Source.POLICY:
            rows = [np.concatenate([rng.permutation(EXPERTS)[:TOP_K] for _ in range(2)]) for _ in segment.token_ids]
            segment = replace(segment, arrays={**segment.arrays, "routed_experts": np.array(rows, np.uint8)})
        segments.append(segment)
    return replace(sample, segments=tuple(segments))
