"""Tiny random models of the decoder architectures that transformers knows, for tests of trainer and engine.

Every entry is a configuration class of transformers by its `model_type`, with sizes small enough that a model is made
and run in milliseconds. Weights are drawn with a standard deviation of 0.2, so that distributions are far from uniform
and a forward that is wrong differs by tenths of a nat. Sliding windows are 8 tokens long: tests use sequences of up to
40.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedModel

from rollmesh.trainer.model_config import auto_class

VOCAB_SIZE = 96
WINDOW = 8
CONTEXT = 128
LENGTH_MAX = 40
"""Longest sequence of the tests; every architecture accepts it."""

_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD_8: Mapping[str, Any] = {"head_dim": 8}
_MOE: Mapping[str, Any] = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
_MLA: Mapping[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
_WINDOWED: Mapping[str, Any] = {"sliding_window": WINDOW}
_MIXED: Mapping[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_MAMBA2: Mapping[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_LINEAR: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_VISION: Mapping[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_MROPE: Mapping[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_GPT2: Mapping[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 1e4, **parameters}}


ARCHITECTURES: dict[str, tuple[str, Mapping[str, Any]]] = {
    # Dense decoders with full causal attention.
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_linear_rope": ("llama", _rope(rope_type="linear", factor=2.0)),
    "llama_llama3_rope": (
        "llama",
        _rope(
            rope_type="llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama_yarn_rope": ("llama", _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)),
    "llama_dynamic_rope": (
        "llama",
        {**_rope(rope_type="dynamic", factor=4.0), "max_position_embeddings": 16},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", _HEAD_8),
    "mistral": ("mistral", {"sliding_window": None}),
    "ministral3": ("ministral3", {}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "granite": ("granite", {}),
    "granite_scaled": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "gemma": ("gemma", _HEAD_8),
    "cohere": ("cohere", {"logit_scale": 1.0}),
    "cohere_scaled": ("cohere", {"logit_scale": 0.25}),
    "smollm3": ("smollm3", {}),
    "glm": ("glm", _HEAD_8),
    "glm4": ("glm4", _HEAD_8),
    "gpt2": ("gpt2", _GPT2),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_bigcode": ("gpt_bigcode", _GPT2),
    "gptj": ("gptj", {**_GPT2, "rotary_dim": 4}),
    "codegen": ("codegen", {**_GPT2, "rotary_dim": 4}),
    "gpt_neo": ("gpt_neo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("falcon", {}),
    "falcon_alibi": ("falcon", {"alibi": True, "new_decoder_architecture": False, "multi_query": False}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT}),
    "stablelm": ("stablelm", {}),
    "seed_oss": ("seed_oss", _HEAD_8),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _HEAD_8),
    "ernie4_5": ("ernie4_5", {}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "helium": ("helium", _HEAD_8),
    "nemotron": ("nemotron", {}),
    "diffllama": ("diffllama", {}),
    "biogpt": ("biogpt", {}),
    "xglm": ("xglm", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}),
    "persimmon": ("persimmon", {}),
    "bitnet": ("bitnet", {}),
    "hyperclovax": ("hyperclovax", {}),
    "hyperclovax_scaled": ("hyperclovax", {"logits_scaling": 0.25}),
    "jais2": ("jais2", {}),
    "nanochat": ("nanochat", {}),
    "minicpm3": ("minicpm3", {**_MLA, "dim_model_base": 16}),
    "modernbert_decoder": ("modernbert-decoder", {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2}),
    # Attention with a window.
    "mistral_window": ("mistral", _WINDOWED),
    "ministral_window": ("ministral", {**_HEAD_8, **_MIXED, **_rope(rope_type="default")}),
    "qwen2_window": ("qwen2", {**_WINDOWED, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3_window": ("qwen3", {**_HEAD_8, **_WINDOWED, "use_sliding_window": True, "max_window_layers": 1}),
    "phi3_window": ("phi3", _WINDOWED),
    "phi3_longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
            },
        },
    ),
    "starcoder2_window": ("starcoder2", _WINDOWED),
    "gemma2": ("gemma2", {**_HEAD_8, **_MIXED, "final_logit_softcapping": None, "attn_logit_softcapping": None}),
    "gemma2_default": ("gemma2", {**_HEAD_8, **_MIXED}),
    "gemma2_softcap": ("gemma2", {**_HEAD_8, **_MIXED, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0}),
    "gemma3": ("gemma3_text", {**_HEAD_8, **_MIXED}),
    "vaultgemma_default": ("vaultgemma", {**_HEAD_8, **_MIXED}),
    "vaultgemma_softcap": (
        "vaultgemma",
        {**_HEAD_8, **_MIXED, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0},
    ),
    "olmo3": ("olmo3", _MIXED),
    "cohere2": ("cohere2", {**_MIXED, "logit_scale": 1.0}),
    "exaone4": ("exaone4", {**_MIXED, "sliding_window_pattern": 2}),
    "gpt_oss": ("gpt_oss", {**_HEAD_8, **_MIXED, **_MOE}),
    # Mixtures of experts.
    "mixtral": ("mixtral", {**_MOE, "sliding_window": None}),
    "mixtral_window": ("mixtral", {**_MOE, **_WINDOWED}),
    "qwen2_moe": ("qwen2_moe", _MOE),
    "qwen3_moe": ("qwen3_moe", {**_HEAD_8, **_MOE}),
    "olmoe": ("olmoe", _MOE),
    "flex_olmo": ("flex_olmo", _MOE),
    "granitemoe": ("granitemoe", _MOE),
    "phimoe": ("phimoe", {**_MOE, "sliding_window": None}),
    "deepseek_v2": ("deepseek_v2", {**_MOE, **_MLA}),
    "deepseek_v3": ("deepseek_v3", {**_MOE, **_MLA}),
    "glm4_moe": ("glm4_moe", {**_HEAD_8, **_MOE, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    "ernie4_5_moe": ("ernie4_5_moe", {**_MOE, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}),
    "llama4": ("llama4_text", {**_HEAD_8, **_MOE, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 48}),
    # Recurrent and hybrid models.
    "mamba": ("mamba", {"state_size": 4, "time_step_rank": 4}),
    "mamba2": ("mamba2", {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 4, "time_step_rank": 4}),
    "qwen3_next": ("qwen3_next", {**_HEAD_8, **_MOE, **_LINEAR}),
    "qwen3_5": ("qwen3_5_text", {**_HEAD_8, **_LINEAR}),
    "jamba": ("jamba", {**_MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 64, "lm_head_multiplier": 0.25}),
    "zamba2": (
        "zamba2",
        {**_MAMBA2, "mamba_headdim": 16, "n_mamba_heads": 4, "num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid"]},
    ),
    "nemotron_h": ("nemotron_h", {"hybrid_override_pattern": "M*", "ssm_state_size": 8, "mamba_num_heads": 4,
                                  "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8, "head_dim": 8}),
    "granitemoehybrid": ("granitemoehybrid", {**_MAMBA2, **_MOE, "layer_types": ["mamba", "attention"]}),
    "minimax": ("minimax", {**_MOE, "layer_types": ["linear_attention", "full_attention"], "block_size": 8}),
    "rwkv": ("rwkv", {"attention_hidden_size": 32, "context_length": CONTEXT}),
    "recurrent_gemma": ("recurrent_gemma", {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": WINDOW,
                                            "logits_soft_cap": 2.0}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "xlstm": ("xlstm", {"num_heads": 4, "embedding_dim": 32}),
    # An encoder with a causal head, and models that also take images.
    "bert": ("bert", {"is_decoder": True}),
    "gemma3_multimodal": (
        "gemma3",
        {"text_config": {**_SIZES, **_HEAD_8, **_MIXED}, "vision_config": _VISION, "mm_tokens_per_image": 4},
    ),
    "qwen3_5_multimodal": (
        "qwen3_5",
        {"text_config": {**_SIZES, **_HEAD_8, **_LINEAR}, "vision_config": {"depth": 1, "hidden_size": 16,
         "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}},
    ),
    "qwen2_vl": (
        "qwen2_vl",
        {"text_config": {**_SIZES, **_MROPE}, "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2,
         "mlp_ratio": 1}},
    ),
    "qwen2_5_vl": (
        "qwen2_5_vl",
        {"text_config": {**_SIZES, **_MROPE}, "vision_config": {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2,
         "intermediate_size": 16, "fullatt_block_indexes": [0]}},
    ),
    "qwen3_vl": (
        "qwen3_vl",
        {"text_config": {**_SIZES, **_HEAD_8, **_MROPE}, "vision_config": {"depth": 1, "hidden_size": 16, "out_hidden_size": 32,
         "num_heads": 2, "intermediate_size": 16, "deepstack_visual_indexes": []}},
    ),
    "llava": (
        "llava",
        {"text_config": {"model_type": "llama", **_SIZES}, "vision_config": {"model_type": "clip_vision_model", **_VISION}},
    ),
    "mistral3": (
        "mistral3",
        {"text_config": {"model_type": "mistral", **_SIZES, **_HEAD_8}, "vision_config": {"model_type": "pixtral", **_VISION}},
    ),
}  # fmt: skip
"""Name in tests and tables -> (`model_type`, changes to the common sizes)."""


_WIDTHS = frozenset(
    {"hidden_size", "intermediate_size", "intermediate_size_mlp", "num_attention_heads", "num_key_value_heads", "moe_intermediate_size",
     "shared_expert_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_embd", "n_head",
     "d_model", "n_heads", "ffn_dim", "word_embed_proj_dim", "attention_heads", "mamba_n_heads", "n_mamba_heads", "mamba_num_heads",
     "mamba_d_ssm", "lru_width", "attention_hidden_size", "dim_model_base"}
)  # fmt: skip
"""Sizes that grow with the width of a model. The size of a head does not."""


def wide_config(name: str, factor: int) -> Any:
    """Return the configuration of a model like the one called `name`, with `factor` times as many channels, heads and
    experts."""
    model_type, changes = ARCHITECTURES[name]
    text = changes.get("text_config", {**_SIZES, **changes})
    wide = {key: value * factor if key in _WIDTHS else value for key, value in text.items()}
    if model_type == "mamba2":
        wide["num_heads"] *= factor
    return CONFIG_MAPPING[model_type](**({**changes, "text_config": wide} if "text_config" in changes else wide))


def build_model(name: str, *, seed: int = 0, fresh: bool = False) -> PreTrainedModel:
    """Return the model called `name`, float32, in evaluation mode. Equal seeds give equal weights.

    `fresh` keeps the weights of a new model, with a standard deviation of 0.02."""
    model_type, changes = ARCHITECTURES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {} if "text_config" in changes else {**_SIZES, **({"initializer_range": 0.02} if fresh else {})}
        config = CONFIG_MAPPING[model_type](**{**sizes, **changes})
        model: Any = auto_class(config).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                deviation = float(parameter.std()) if parameter.ndim >= 2 else 0.0
                if 0.0 < deviation < 0.1 and not fresh:
                    parameter.mul_(0.2 / deviation)
    made: PreTrainedModel = model.eval()
    return made
