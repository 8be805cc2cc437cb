"""Results of `choose_forward` and `plan_folder` for arguments that the process has seen before."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers import PreTrainedModel

from rollmesh.trainer import memory_plan, self_test, update
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.memory_plan import MemoryPlan, plan_folder
from rollmesh.trainer.model_config import check_trainable
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.self_test import ForwardChoice, choose_forward, prepare
from rollmesh.trainer.spread_model import SpreadCopy

PARAMETERS_MAX = 1 << 20
"""Models with more parameters are not remembered, because to read their weights takes longer."""
_choices: dict[object, ForwardChoice] = {}
_plans: dict[object, MemoryPlan] = {}


def _key(model: PreTrainedModel) -> object:
    """Return what decides the outcome of the self-test: the code, the configuration and the weights."""
    weights = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        weights.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.device}".encode())
        weights.update(tensor.detach().float().contiguous().numpy().tobytes())
    code = type(model), type(model).forward, model.__dict__.get("forward")
    return code, repr(model), model.config.to_json_string(use_diff=False), weights.hexdigest()


def _choose_forward(model: PreTrainedModel, spread: SpreadCopy | None = None) -> ForwardChoice:
    check_trainable(model)
    prepare(model)
    parameters = list(model.parameters())
    if sum(p.numel() for p in parameters) > PARAMETERS_MAX or any(p.device.type != "cpu" for p in parameters):
        return choose_forward(model, spread)
    key = _key(model)
    if key not in _choices:
        _choices[key] = choose_forward(model, spread)
    return _choices[key]


def _plan_folder(config: UpdateConfig, folder: Path, plugins: Plugins, **more: Any) -> MemoryPlan:
    """A part of a user, which is named by its file, is not remembered."""
    settings = msgspec.json.encode(config).decode()
    if ".py:" in settings or config.reference.path or not (folder / "config.json").is_file():
        return plan_folder(config, folder, plugins, **more)
    key = settings, (folder / "config.json").read_bytes(), repr(more)
    if key not in _plans:
        _plans[key] = plan_folder(config, folder, plugins, **more)
    return _plans[key]


def install(patch: pytest.MonkeyPatch) -> None:
    """Replace the functions where the product reads them."""
    for module in (self_test, update):
        patch.setattr(module, "choose_forward", _choose_forward)
    patch.setattr(memory_plan, "plan_folder", _plan_folder)
