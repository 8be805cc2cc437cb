"""Only models the engine computes exactly are taken; the others are refused by the field that differs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.services.inference.engines.model_spec import read_model_spec
from rollmesh.services.inference.engines.torch_runner import TorchRunner
from rollmesh.services.inference.engines.weights_buffer import load_weights

from .builders import TinyModel, hf_logprobs, hf_model, random_prompt


@pytest.mark.parametrize(
    ("family", "fields"),
    [("Qwen2", {"tie_word_embeddings": False}), ("Llama", {"attention_bias": True, "head_dim": 16})],
)
def test_family_scores_like_transformers(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = hf_model(family, **fields)
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor, std=0.5)
    model.save_pretrained(tmp_path)
    spec = read_model_spec(tmp_path)
    weights = load_weights(spec, {"w": tmp_path / "model.safetensors"}, torch.float32, torch.device("cpu"))
    runner = TorchRunner(spec, slots=1, context_max=64, device="cpu", dtype=torch.float32, torchscript=False)
    rows = [np.array(random_prompt(i, 5 + 9 * i), np.int32) for i in range(4)]
    for row, scored in zip(rows, runner.score(weights, rows), strict=True):
        np.testing.assert_allclose(scored, hf_logprobs(model, row), atol=1e-4)


def test_bfloat16_scores_close_to_float32(tiny: TinyModel) -> None:
    spec, row = read_model_spec(tiny.folder), np.array(random_prompt(3, 40), np.int32)
    weights = load_weights(spec, {"w": tiny.file(0)}, torch.bfloat16, torch.device("cpu"))
    runner = TorchRunner(spec, slots=1, context_max=64, device="cpu", dtype=torch.bfloat16, torchscript=False)
    (scored,) = runner.score(weights, [row])
    differences = np.abs(scored - tiny.logprobs(0, row))
    assert 0 < differences.mean() < 0.1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gpt2"),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_unsupported_model_is_refused_naming_folder_and_field(
    tiny: TinyModel, tmp_path: Path, field: str, value: object
) -> None:
    config = json.loads((tiny.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=rf"{tmp_path}.*({field}|rope_type)"):
        read_model_spec(tmp_path)


def test_missing_field_and_missing_file_are_named(tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json cannot be read"):
        read_model_spec(tmp_path)
    config = json.loads((tiny.folder / "config.json").read_text())
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no field 'hidden_size'"):
        read_model_spec(tmp_path)
