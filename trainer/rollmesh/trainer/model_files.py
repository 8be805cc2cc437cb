"""A model folder in plain transformers format: config.json, generation_config.json, model.safetensors, tokenizer files.

The model is written without `save_pretrained`, because a learner publishes the same single safetensors file, and one
function must decide which tensors it has and their names. Tied weights are stored once. Collaborators: `checkpoint`
(adds learner state), `update` (export for publishing).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rollmesh.shared.weights.precision import DTYPES
from rollmesh.trainer.model_config import CONFIG_ERRORS, auto_class, has_tied_head, one_line
from rollmesh.trainer.ranks import ONE_RANK, Ranks
from rollmesh.trainer.sharding import assign, class_name, empty_model, parts_on_first, whole

WEIGHTS_NAME = "model.safetensors"
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model that also takes images, which its folder keeps. The loaded model has their contents as
`processor_files`."""
_CODES = {name: code for code, name in DTYPES.items()}
"""Names of element types in the header of a safetensors file, by their names in torch."""
_log = logging.getLogger(__name__)


def published_tensors(model: PreTrainedModel, *, merged: bool = True) -> dict[str, Tensor]:
    """Return all tensors of the model by name, without a tied output layer. Those of a sharded model are its parts on
    this rank.

    Of a model with adapters (`lora`) they are those of its base, into which the adapters are merged unless `merged` is
    False."""
    state = _without_adapters(model, model.state_dict(), merged=merged)
    if has_tied_head(model):
        for name in model._tied_weights_keys or ():
            state.pop(name, None)
    return state


@torch.no_grad()
def _without_adapters(model: PreTrainedModel, state: dict[str, Tensor], *, merged: bool) -> dict[str, Tensor]:
    """Return a state dict under the names of the base, with W + s B A for W if `merged`. Without adapters it is the
    same."""
    found = {}
    for name, tensor in state.items():
        module, is_adapted, rest = name.rpartition(".base_layer.")
        if is_adapted and merged and rest == "weight":
            a, b = (state[f"{module}.lora_{part}.default.weight"] for part in "AB")
            scaling: Any = model.get_submodule(module).scaling
            tensor = tensor + scaling["default"] * (b @ a)
        if ".lora_" not in name:
            found[f"{module}.{rest}" if is_adapted else name] = tensor
    return found


def published_state(model: PreTrainedModel, *, merged: bool = True, copied: bool = False) -> dict[str, Tensor]:
    """Return the tensors of `published_tensors`, contiguous on the CPU and whole. `copied` requests copies also of
    tensors on the CPU.

    Every rank must call it, and gets a whole copy."""
    return {
        name: whole(tensor.detach()).to("cpu", copy=copied).contiguous()
        for name, tensor in published_tensors(model, merged=merged).items()
    }


def write_weights(
    model: PreTrainedModel,
    path: Path | None,
    state: dict[str, Tensor] | None = None,
    *,
    dtype: torch.dtype | None = None,
    merged: bool = True,
) -> None:
    """Write the whole state dict, or a copy of it, to one safetensors file, with floating-point tensors rounded to
    `dtype`. Equal weights give equal bytes.

    Rank 0 gathers one tensor at a time. Every rank of a divided model must call it; those with None in place of the
    path only contribute their parts."""
    found = published_tensors(model, merged=merged) if state is None else state
    types = {n: dtype if dtype is not None and t.is_floating_point() else t.dtype for n, t in found.items()}
    # The order of the library, which keeps values aligned.
    names = sorted(found, key=lambda name: (-types[name].itemsize, name))
    with nullcontext() if path is None else path.open("wb") as file:
        if file is not None:
            file.write(_header((name, types[name], found[name].shape) for name in names))
        for name in names:
            for part in parts_on_first(found[name].detach()):
                if file is not None:
                    file.write(part.to("cpu", types[name]).contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _header(tensors: Iterable[tuple[str, torch.dtype, torch.Size]]) -> bytes:
    """Return the beginning of a safetensors file that has these tensors one after another."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + shape.numel() * dtype.itemsize
        entries[name] = {
            "dtype": _CODES[str(dtype).removeprefix("torch.")],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def fingerprint(model: PreTrainedModel) -> str:
    """Return a text that is equal for equal weights: sums of the bits of each tensor, which do not depend on the
    machine."""
    lines = []
    for name, tensor in published_tensors(model).items():
        flat = tensor.detach().reshape(-1).contiguous()
        bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8)
        odd = bits[1::2].sum(dtype=torch.int64)
        lines.append(f"{name} {tuple(tensor.shape)} {tensor.dtype} {int(bits.sum(dtype=torch.int64))} {int(odd)}")
    return "\n".join(lines)


def write_model_folder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    state: dict[str, Tensor] | None = None,
) -> None:
    """Write everything that transformers needs to load model and tokenizer into an existing folder. `state` is a copy
    of the weights; by default the current ones are written."""
    write_weights(model, folder / WEIGHTS_NAME, state)
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [class_name(model)]
    _write_json(folder / "config.json", _both_spellings(config))
    _write_json(folder / "generation_config.json", model.generation_config.to_diff_dict())
    for name, content in getattr(model, "processor_files", {}).items():
        (folder / name).write_bytes(content)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer's files so that transformers 4.x and 5.x both load them.

    transformers 5 writes the name of a class that 4.x does not have (`TokenizersBackend`). This writes a name that
    exists in both.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def read_config(folder: Path | str) -> PretrainedConfig:
    """Read the configuration of a model folder. Raises ValueError naming the folder."""
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(os.fspath(folder))
        return found
    except CONFIG_ERRORS as error:
        raise ValueError(
            f"no model can be loaded from {folder}: config.json cannot be read: {one_line(error)}"
        ) from error


def load_model(folder: Path | str, *, device: str = "cpu") -> PreTrainedModel:
    """Load a model folder in float32, whole. Raises ValueError naming the folder and the tensors that do not fit.

    transformers only warns about missing tensors and initializes them randomly. Here they are an error.
    """
    config = read_config(folder)
    try:
        loaded: Any = auto_class(config).from_pretrained(
            os.fspath(folder), dtype=torch.float32, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"no model can be loaded from {folder}: {error}") from error
    model: PreTrainedModel = loaded[0]
    info = loaded[1]
    unfit = sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"])))
    if unfit:
        raise ValueError(f"the weights in {folder} do not have all tensors of the model in its shapes: {unfit[:8]}")
    if unexpected := sorted(map(str, info["unexpected_keys"])):
        _log.warning(
            "tensors that the model does not have are neither trained nor written: folder=%s number=%d first=%s",
            folder,
            len(unexpected),
            unexpected[:4],
        )
    found = {name: Path(folder) / name for name in _PROCESSOR_FILES}
    model.processor_files = {name: path.read_bytes() for name, path in found.items() if path.is_file()}  # type: ignore[assignment]
    model.to(device)  # type: ignore[arg-type]  # the library's annotation lacks the parameter
    return model


def open_model(folder: Path | str, *, device: str = "cpu", ranks: Ranks = ONE_RANK) -> PreTrainedModel:
    """Load a model folder like `load_model` on rank 0, which alone reads the weights. Every other rank gets the same
    model without values, see `sharding.empty_model`, and raises RankFailed if rank 0 cannot load it."""
    loaded: list[PreTrainedModel] = []

    def load() -> tuple[type[PreTrainedModel], PretrainedConfig]:
        loaded.append(load_model(folder, device=device))
        return type(loaded[0]), loaded[0].config

    kind, config = ranks.from_first(load)
    return loaded[0] if loaded else empty_model(kind, config)


def load_weights(model: PreTrainedModel, path: Path) -> None:
    """Overwrite a model's weights in place with a file of `write_weights`, of which every rank reads its part. Raises
    ValueError on missing or extra names, and if the file cannot be read."""
    targets = published_tensors(model)
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            if names != set(targets):
                raise ValueError(f"{path} has other tensors than the model: {sorted(names ^ set(targets))[:8]}")
            for name, target in targets.items():
                values = file.get_slice(name)
                assign(target, values if values.get_shape() else file.get_tensor(name), values.get_shape())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read: {error}; every rank must be able to read it") from error


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
