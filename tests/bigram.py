"""A model folder and two sets of weights for `rollmesh.testing.fake_sglang_server`."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def bigram_model(folder: Path, vocab_size: int, context_max: int) -> Path:
    """Write FOLDER/model with a configuration, and the weights FOLDER/0.safetensors and FOLDER/1.safetensors. Return
    the model folder."""
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    fields = {
        "model_type": "bigram",
        "architectures": ["BigramForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": 4,
        "max_position_embeddings": context_max,
    }
    (model / "config.json").write_text(json.dumps(fields))
    for index in range(2):
        table = torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(index)) * 2.0
        save_file({"bigram": table}, folder / f"{index}.safetensors")
    return model
