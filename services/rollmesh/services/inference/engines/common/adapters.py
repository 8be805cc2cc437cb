"""Low-rank adapters: merged into the weights of their version before an engine loads them, so that every engine serves
them.

An adapter version has the files of the base and the two files that `peft` writes. For each adapted matrix W [out, in]

    W' = W + s B A,   A [r, in], B [out, r],   s = alpha / r, or alpha / sqrt(r) with `use_rslora`

computed in float32 and rounded to the type of W once, as `merge_and_unload` of peft does for float32 weights. Of whole
modules that were trained beside the adapter (`modules_to_save`) the tensors replace those of the base. Other kinds of
adapters are rejected by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.shared.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS

PREFIX = "base_model.model."
"""What peft puts before the names of the model."""
_UNSUPPORTED = (
    "use_dora",
    "alpha_pattern",
    "rank_pattern",
    "fan_in_fan_out",
    "megatron_config",
    "eva_config",
    "alora_invocation_tokens",
)
"""Settings of peft that change the formula. An adapter with one of them is rejected."""


def merge_adapter(files: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Return the files of the merged weights, by the names of the base's. Without an adapter these are the files.

    Files with an adapted tensor are written to `folder`. Call it in a thread. Raises `WeightsMismatch` for an adapter
    that does not fit, and OSError.
    """
    if ADAPTER_WEIGHTS not in files:
        return dict(files)
    adapter = Adapter(files)
    folder.mkdir(parents=True, exist_ok=True)
    merged: dict[str, Path] = {}
    for name, path in base_files(files).items():
        state = _read(name, path)
        changed = [key for key in state if adapter.merge_into(state, key)]
        merged[name] = path
        if changed:
            merged[name] = folder / name
            try:
                save_file(state, merged[name])
            except SafetensorError as error:
                raise OSError(f"cannot write {merged[name]}: {error}") from error
    adapter.check_used()
    return merged


def base_files(files: Mapping[str, Path]) -> dict[str, Path]:
    """Return the files without those of the adapter."""
    return {name: path for name, path in files.items() if name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}


class Adapter:
    """The adapter among the files of a version. Raises `WeightsMismatch` if it is of another kind, or cannot be
    read."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._tensors = _read(ADAPTER_WEIGHTS, files[ADAPTER_WEIGHTS])
        """Tensors that have not been merged yet."""
        self._scale, self._rank = _scale(files[ADAPTER_CONFIG])

    def merge_into(self, state: dict[str, Tensor], key: str) -> bool:
        """Merge what the adapter has for one tensor. Return whether there was anything."""
        return _merge_into(state, key, self._tensors, self._scale, self._rank)

    def check_used(self) -> None:
        """Raise `WeightsMismatch` if a tensor of the adapter was not merged."""
        if self._tensors:
            raise WeightsMismatch(
                f"the adapter has tensors for which the base has no weight, first {min(self._tensors)}: it was made "
                "for another model, or is of a kind that is not supported (LoRA of linear layers)"
            )


def _merge_into(state: dict[str, Tensor], key: str, adapter: dict[str, Tensor], scale: float, rank: int) -> bool:
    """Merge what the adapter has for one tensor, and take it from the adapter. Return whether there was anything."""
    weight = state[key]
    if (whole := adapter.pop(PREFIX + key, None)) is not None:
        if whole.shape != weight.shape:
            raise WeightsMismatch(f"the adapter's {key} has shape {list(whole.shape)}, the base {list(weight.shape)}")
        state[key] = whole.to(weight.dtype)
        return True
    module = PREFIX + key.removesuffix(".weight")
    a, b = (adapter.pop(f"{module}.lora_{part}.weight", None) for part in "AB")
    if a is None and b is None:
        return False
    if a is None or b is None:
        raise WeightsMismatch(f"the adapter has only one of lora_A and lora_B for {key}")
    out, into = weight.shape if weight.ndim == 2 else (0, 0)
    if a.shape != (rank, into) or b.shape != (out, rank):
        raise WeightsMismatch(
            f"the adapter of {key} has shapes {list(a.shape)} and {list(b.shape)}; for rank {rank} and a weight of "
            f"shape {list(weight.shape)}, [{rank}, {into}] and [{out}, {rank}] are expected"
        )
    state[key] = (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)
    return True


def _scale(path: Path) -> tuple[float, int]:
    """Return s and r of an adapter's configuration."""
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        kind = config.get("peft_type", "LORA")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsMismatch(f"{ADAPTER_CONFIG} is not the configuration of a LoRA adapter: {error!r}") from error
    if rank < 1 or not math.isfinite(alpha):
        raise WeightsMismatch(f"{ADAPTER_CONFIG}: r must be >= 1 and lora_alpha finite, got {rank} and {alpha}")
    if (
        kind != "LORA"
        or (found := [key for key in _UNSUPPORTED if config.get(key)])
        or config.get("bias", "none") != "none"
    ):
        what = f"peft_type {kind}" if kind != "LORA" else ", ".join(found) or f"bias {config['bias']}"
        raise WeightsMismatch(f"{ADAPTER_CONFIG}: {what} is not supported; merge the adapter and publish whole weights")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), rank


def _read(name: str, path: Path) -> dict[str, Tensor]:
    try:
        state: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsMismatch(f"{name} is not readable safetensors: {error}") from error
    for key, tensor in state.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise WeightsMismatch(f"{name}: tensor {key} has a value that is NaN or infinite")
    return state
