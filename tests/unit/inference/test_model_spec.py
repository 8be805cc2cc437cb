"""Only models the engine computes exactly are taken; the others are refused by the field that differs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rollmesh.services.inference.engines.model_spec import read_model_spec
from rollmesh.services.inference.engines.torch_runner import TorchRunner
from rollmesh.services.inference.engines.weights_buffer import load_weights

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip


def models() -> dict[str, PreTrainedModel]:
    torch.manual_seed(0)
    built = {
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, rope_theta=5000.0)),
    }
    for model in built.values():
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(tensor, std=0.5)
    return built


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_family_scores_like_transformers(family: str, tmp_path: Path) -> None:
    model = models()[family].eval()
    model.save_pretrained(tmp_path)
    spec = read_model_spec(tmp_path)
    weights = load_weights(spec, {"w": tmp_path / "model.safetensors"}, torch.float32, torch.device("cpu"))
    runner = TorchRunner(spec, slots=1, context_max=64, device="cpu", dtype=torch.float32, torchscript=False)
    rows = [np.random.default_rng(i).integers(0, 40, 5 + 9 * i).astype(np.int32) for i in range(4)]
    for row, scored in zip(rows, runner.score(weights, rows), strict=True):
        ids = torch.from_numpy(row.astype(np.int64))[None]
        with torch.no_grad():
            expected = model(ids).logits[0].log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(scored[1:], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gpt2"),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0}),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_unsupported_model_is_refused_naming_folder_and_field(tiny, tmp_path: Path, field: str, value: object) -> None:
    config = json.loads((tiny.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ValueError, match=rf"{tmp_path}.*({field}|rope_type)"):
        read_model_spec(tmp_path)


def test_missing_field_and_missing_file_are_named(tiny, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config.json cannot be read"):
        read_model_spec(tmp_path)
    config = json.loads((tiny.folder / "config.json").read_text())
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no field 'hidden_size'"):
        read_model_spec(tmp_path)
