"""The built-in decoder equals transformers, and rejects an unknown model by the field that differs."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.services.inference.engines.torch.built_in_runner import TorchRunner
from rollmesh.services.inference.engines.torch.model_spec import ModelSpec, UnknownToDecoder, model_spec, read_config
from rollmesh.services.inference.engines.torch.self_check import SLOTS, TOLERANCE, SelfCheck, reference_model
from rollmesh.trainer.model_config import use_whole_attention
from tests.models.architectures import build_model

from .builders import TinyModel, hf_logprobs, hf_model, load_weights, random_prompt, read_spec

CPU = torch.device("cpu")


def runner_of(spec: ModelSpec, *, dtype: torch.dtype = torch.float32) -> TorchRunner:
    return TorchRunner(spec, slots=SLOTS, context_max=64, device="cpu", dtype=dtype)


@pytest.mark.parametrize(
    ("family", "fields"),
    [("Qwen2", {"tie_word_embeddings": False}), ("Llama", {"head_dim": 16})],
)
def test_family_scores_like_transformers(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = hf_model(family, **fields)
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor, std=0.5)
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path)
    weights = load_weights(spec, {"w": tmp_path / "model.safetensors"})
    rows = [np.array(random_prompt(i, 5 + 9 * i), np.int32) for i in range(4)]
    for row, scored in zip(rows, runner_of(spec).score(weights, rows), strict=True):
        np.testing.assert_allclose(scored["logprobs"], hf_logprobs(model, row), atol=1e-4)


def test_bfloat16_scores_close_to_float32(tiny: TinyModel) -> None:
    spec, row = read_spec(tiny.folder), np.array(random_prompt(3, 40), np.int32)
    weights = load_weights(spec, {"w": tiny.file(0)}, torch.bfloat16)
    (scored,) = runner_of(spec, dtype=torch.bfloat16).score(weights, [row])
    differences = np.abs(scored["logprobs"] - tiny.logprobs(0, row))
    assert 0 < differences.mean() < 0.1


@pytest.mark.parametrize("name", ["llama_llama3_rope", "qwen2", "qwen3"])
def test_architecture_scores_and_generates_like_transformers(name: str) -> None:
    model: Any = build_model(name)
    use_whole_attention(model)
    runner = runner_of(model_spec(model.config))
    assert SelfCheck(model, CPU).difference(runner, runner.lay_out(model.state_dict())) < 1e-4


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama_llama3_rope", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("qwen3_window", "layer_types", ["full_attention"] * 2),
        ("qwen3", "rms_norm_eps", 0.01),
    ],
)
def test_self_check_finds_what_a_decoder_leaves_out(name: str, field: str, value: object) -> None:
    model = reference_model(build_model(name).config)
    wrong = copy.deepcopy(model.config)
    setattr(wrong, field, value)
    check = SelfCheck(model, CPU)

    def difference(config: Any) -> float:
        runner = runner_of(model_spec(config))
        return check.difference(runner, runner.lay_out(model.state_dict()))

    if field != "layer_types":  # the decoder has no windows
        assert difference(model.config) < TOLERANCE / 10
    assert difference(wrong) > 2 * TOLERANCE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "relu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("quantization_config", {"bits": 4}),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rope_type", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}),
        (
            "partial_rotary_factor",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ),
    ],
)
def test_what_the_decoder_does_not_know_is_rejected_by_field(tiny: TinyModel, field: str, value: object) -> None:
    config = read_config(tiny.folder)
    for name, changed in (value if isinstance(value, dict) and "rope_parameters" in value else {field: value}).items():
        setattr(config, name, changed)
    with pytest.raises(UnknownToDecoder, match=field):
        model_spec(config)


def test_other_families_and_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownToDecoder, match="model_type 'gpt2' is not one of llama, mistral, qwen2, qwen3"):
        model_spec(build_model("gpt2").config)
    with pytest.raises(ValueError, match=f"model {tmp_path}: config.json cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard_of"}))
    with pytest.raises(ValueError, match="unheard_of"):
        read_config(tmp_path)
