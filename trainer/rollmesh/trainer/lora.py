"""Low-rank adapters of a model (LoRA, Hu et al., arXiv:2106.09685), made and computed by the package `peft`.

The weight W [out, in] of a linear layer becomes W + s B A, with A [r, in], B [out, r] and s = alpha / r. Only A and B
are trained. B begins as zeros, so the model begins with the weights of its base. The model remains a `PreTrainedModel`,
so every forward is that of whole weights.

    adapter_model.safetensors, adapter_config.json    as `peft.PeftModel.from_pretrained` reads them
    base.json                                         folder and fingerprint of the base

Collaborators: `update` (owns the adapters), `checkpoint` (writes and loads them), `reference` (the base as the initial
model), `model_files` (whole weights of a model with adapters).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollmesh.shared.errors import ConfigError
from rollmesh.shared.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rollmesh.trainer.config import LoraSettings
from rollmesh.trainer.model_config import text_config, text_part
from rollmesh.trainer.model_files import fingerprint

_log = logging.getLogger(__name__)

BASE_NAME = "base.json"
_KEY = "learner.lora"
_PREFIX = "base_model.model."
"""What peft writes before the names of the model."""
_NAME = "default"
"""peft's name of the only adapter; files do not have it."""
_COMPARED = ("r", "lora_alpha", "target_modules")


class Adapters:
    """The trained adapters of a model. Not thread-safe."""

    def __init__(self, model: PreTrainedModel, config: LoraSettings, seed: int) -> None:
        """Add adapters to `model`, in place, and freeze its other weights. A is drawn from the seed.

        Raises ConfigError for a target that no linear layer matches, for a rank larger than a layer, and without the
        package peft.
        """
        self.base = {
            "model": os.path.abspath(model.name_or_path) if model.name_or_path else "",
            "sha256": hashlib.sha256(fingerprint(model).encode()).hexdigest(),
        }
        self._model = model
        self.settings = inject(model, config, seed)

    def tensors(self) -> dict[str, Tensor]:
        """Return A and B of every layer by the names in the file, contiguous on the CPU."""
        return {key: tensor.detach().to("cpu").contiguous() for key, tensor in self._parameters().items()}

    def write(self, folder: Path, *, name_base: bool = True) -> dict[str, Path]:
        """Write the adapter into an existing folder, and return its two files by name. Equal weights give equal bytes.

        `name_base` writes the folder of the base, which other hosts do not have."""
        paths = {name: folder / name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}
        base = self.base["model"] if name_base else None
        _write_json(paths[ADAPTER_CONFIG], {**self.settings, "base_model_name_or_path": base})
        save_file(self.tensors(), paths[ADAPTER_WEIGHTS], metadata={"format": "pt"})
        return paths

    def write_base(self, folder: Path) -> None:
        """Write which base the adapter belongs to."""
        _write_json(folder / BASE_NAME, self.base)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the adapter that `write` and `write_base` wrote. Raises ValueError if it has other settings, or another
        base."""
        stored = json.loads((folder / ADAPTER_CONFIG).read_text())
        if changed := [k for k in _COMPARED if stored.get(k) != self.settings[k]]:
            differences = ", ".join(f"{k} {stored.get(k)} -> {self.settings[k]}" for k in changed)
            raise ValueError(
                f"its adapters differ from those of `{_KEY}` ({differences}); resume with the settings with which they "
                "were written, or merge them into the base and begin a new run from it"
            )
        base = json.loads((folder / BASE_NAME).read_text())
        if base["sha256"] != self.base["sha256"]:
            raise ValueError(
                f"its adapters belong to the weights that {base['model'] or 'the model'} had when the run began, and "
                f"those of {self.base['model'] or 'the model'} differ; restore them, or begin a new run"
            )
        tensors, parameters = load_file(folder / ADAPTER_WEIGHTS), self._parameters()
        if set(tensors) != set(parameters):
            raise ValueError(f"{ADAPTER_WEIGHTS} has other tensors: {sorted(set(tensors) ^ set(parameters))[:8]}")
        for key, parameter in parameters.items():
            parameter.copy_(tensors[key])

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let the model compute with the weights of its base inside."""
        layers = [m for m in self._model.modules() if hasattr(m, "lora_A")]
        try:
            for layer in layers:
                layer.enable_adapters(False)  # type: ignore[operator]  # a layer of peft
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)  # type: ignore[operator]

    def _parameters(self) -> dict[str, Tensor]:
        return {
            _PREFIX + name.replace(f".{_NAME}.", "."): parameter
            for name, parameter in self._model.named_parameters()
            if ".lora_" in name
        }


def inject(model: PreTrainedModel, config: LoraSettings, seed: int = 0) -> dict[str, Any]:
    """Add adapters to a model, see `Adapters`. Return peft's settings of them, in an order that does not depend on the
    process."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as err:
        raise ConfigError(f"`{_KEY}` requires the package peft: pip install 'rollmesh[lora]'", key=_KEY) from err
    _check(model, config)
    targets = list(config.targets)
    if text_config(model) is not model.config:  # a name may also match layers of other parts
        targets = [n for n in _linear_layers(model) if any(_matches(n, target) for target in targets)]
    make_settings: Any = LoraConfig  # annotated with whole numbers for alpha only
    settings = make_settings(
        r=config.rank,
        lora_alpha=int(config.alpha) if config.alpha == int(config.alpha) else config.alpha,
        target_modules=targets or _all_targets(model),
        task_type="CAUSAL_LM",
    )
    layers = ", ".join(_all_targets(model))
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(settings, model)
        except ValueError as error:
            raise ConfigError(
                f"`{_KEY}.targets` {list(config.targets)}: peft cannot adapt these layers of {type(model).__name__}: "
                f"{error}; the model has the linear layers {layers}; name those to adapt",
                key=f"{_KEY}.targets",
            ) from error
    _warn_of_stacks(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    model.train(False)
    found = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.to_dict().items()}
    return {**json.loads(json.dumps(found, default=str)), "inference_mode": True}


def _warn_of_stacks(model: PreTrainedModel) -> None:
    """Log the matrices of experts that are stacked in one tensor, because they are not linear layers."""
    stacks = _stacks(model)
    if stacks:
        count, total = (sum(p.numel() for p in parts) for parts in (stacks.values(), model.parameters()))
        _log.warning(
            "experts get no low-rank adapter, because their matrices are stacked in one tensor: model=%s tensors=%s "
            "first=%s share_of_weights=%.2f",
            type(model).__name__,
            len(stacks),
            next(iter(stacks)),
            count / total,
        )


def _stacks(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the stacked matrices [experts, out, in] of the text part by name."""
    kept = text_part(model)
    owned = [
        (f"{path}.{name}", parameter)
        for path, module in model.named_modules()
        if not isinstance(module, nn.Conv1d)
        for name, parameter in module.named_parameters(recurse=False)
    ]
    return {name: parameter for name, parameter in owned if parameter.ndim == 3 and name in kept}


def _check(model: PreTrainedModel, config: LoraSettings) -> None:
    """Raise ConfigError for targets and a rank that do not fit the layers of the model."""
    linear = _linear_layers(model)
    for target in config.targets:
        if not any(_matches(name, target) for name in linear):
            if any(_matches(name, target) for name in _stacks(model)):
                raise ConfigError(
                    f"`{_KEY}.targets`: {target!r} of {type(model).__name__} is a stack of the matrices of experts, "
                    "for which adapters are not "
                    f"implemented; name linear layers: {', '.join(_all_targets(model)) or 'it has none'}",
                    key=f"{_KEY}.targets",
                )
            raise ConfigError(
                f"`{_KEY}.targets`: no linear layer of {type(model).__name__} matches {target!r}; it has "
                f"{', '.join(_all_targets(model)) or 'none'}",
                key=f"{_KEY}.targets",
            )
    for name, layer in linear.items():
        smaller = min(layer.in_features, layer.out_features)
        if config.rank > smaller and any(_matches(name, t) for t in config.targets or _all_targets(model)):
            raise ConfigError(
                f"`{_KEY}.rank` must be <= {smaller}, the smaller side of {name} [{layer.out_features}, "
                f"{layer.in_features}], got {config.rank}; lower it, or leave the layer out of `{_KEY}.targets`",
                key=f"{_KEY}.rank",
            )
    if not linear:
        raise ConfigError(f"`{_KEY}`: {type(model).__name__} has no linear layers beside its output layer", key=_KEY)


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers of the text part except the output layer, whose weight may be that of the embeddings."""
    head, kept = model.get_output_embeddings(), text_part(model)  # type: ignore[no-untyped-call]
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    return {n: m for n, m in linear.items() if f"{n}.weight" in kept}


def _all_targets(model: PreTrainedModel) -> list[str]:
    """Return the last parts of the names of all linear layers, sorted; the whole name where another module ends with
    it."""
    linear = _linear_layers(model)
    others = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in linear}
    return sorted({last if (last := name.rpartition(".")[2]) not in others else name for name in linear})


def _matches(name: str, target: str) -> bool:
    """Return whether a module is a target, as peft decides it."""
    return name == target or name.endswith(f".{target}")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
