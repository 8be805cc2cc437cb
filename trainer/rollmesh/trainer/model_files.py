"""A model folder in plain transformers format: config.json, generation_config.json, model.safetensors, tokenizer files.

The model is written without `save_pretrained`, because a learner publishes the same single safetensors file, and one function must
decide which tensors it has and their names. Tied weights are stored once.
Collaborators: `checkpoint` (adds learner state), `update` (export for publishing).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

WEIGHTS_NAME = "model.safetensors"


def published_state(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return all tensors of the model by name, contiguous on the CPU, without a tied output layer."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        for name in model._tied_weights_keys or ():
            state.pop(name, None)
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in state.items()}


def write_weights(model: PreTrainedModel, path: Path) -> None:
    """Write the whole state dict to one safetensors file. Equal weights give equal bytes."""
    save_file(published_state(model), path, metadata={"format": "pt"})


def write_model_folder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Write everything that `AutoModelForCausalLM` and `AutoTokenizer` need into an existing folder."""
    write_weights(model, folder / WEIGHTS_NAME)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    _write_json(folder / "config.json", _both_spellings(config))
    _write_json(folder / "generation_config.json", model.generation_config.to_diff_dict())
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer's files so that transformers 4.x and 5.x both load them.

    transformers 5 writes the name of a class that 4.x does not have (`TokenizersBackend`). This writes a name that exists in both.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load_model(folder: Path | str, *, device: str = "cpu") -> PreTrainedModel:
    """Load a model folder in float32. Raises ValueError naming the folder and the tensors that do not fit.

    transformers only warns about missing tensors and initializes them randomly. Here they are an error.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            os.fspath(folder), dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"no model can be loaded from {folder}: {error}") from error
    model: PreTrainedModel = loaded[0]
    info = loaded[1]
    unfit = sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"])))
    if unfit:
        raise ValueError(f"the weights in {folder} do not have all tensors of the model in its shapes: {unfit[:8]}")
    model.to(device)  # type: ignore[arg-type]  # the library's annotation lacks the parameter
    return model


def load_weights(model: PreTrainedModel, path: Path) -> None:
    """Overwrite a model's weights in place with a file of `write_weights`. Raises ValueError on missing or extra names."""
    state = load_file(path)
    expected = set(published_state(model))
    if set(state) != expected:
        raise ValueError(f"{path} has other tensors than the model: {sorted(set(state) ^ expected)[:8]}")
    model.load_state_dict(state, strict=False)


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder. Raises ValueError naming the folder."""
    try:
        return AutoTokenizer.from_pretrained(os.fspath(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"no tokenizer can be loaded from {folder}: {error}") from error


def _both_spellings(config: dict[str, Any]) -> dict[str, Any]:
    """Add the names that transformers 4.x reads: `torch_dtype` and `rope_theta`."""
    if "dtype" in config:
        config.setdefault("torch_dtype", config["dtype"])
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
        config.setdefault("rope_scaling", None)
    return config


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
