"""Choose how the engine runs a model: the fastest forward whose log-probs equal the plain transformers forward.

    built_in    the decoder of `model`: continuous batching, prefixes shared between sequences
    cached      the transformers forward with the model's own cache, one sequence at a time
    recompute   the transformers forward of the whole sequence at every step

Each forward is compared before the engine serves (`self_check`). If none is equal, the model is rejected with
ConfigError.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.services.inference.engines.torch.built_in_runner import TorchRunner
from rollmesh.services.inference.engines.torch.config import TorchEngineConfig
from rollmesh.services.inference.engines.torch.model_spec import UnknownToDecoder, model_spec, read_config
from rollmesh.services.inference.engines.torch.plain_runner import PlainRunner
from rollmesh.services.inference.engines.torch.runner import Runner
from rollmesh.services.inference.engines.torch.self_check import SLOTS, TOLERANCE, SelfCheck, reference_model
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.weights.model_folder import check_positions
from rollmesh.trainer.expert_modules import expert_modules
from rollmesh.trainer.model_config import auto_class
from rollmesh.trainer.spread_model import raise_if_out_of_memory

FORWARDS = BUILT_IN, CACHED, RECOMPUTE = "built_in", "cached", "recompute"
_CONTEXT_KEY = "inference.engine.options.context_max"
MODEL_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""Exceptions that the code of a model may raise under a forward that it does not support."""
_log = logging.getLogger(__name__)


class Execution(NamedTuple):
    """The forward of a model."""

    forward: str
    reason: str
    """Why a faster forward is not used; empty for `built_in`."""


def find_execution(config: TorchEngineConfig) -> Execution:
    """Return how the engine will run the configured model. Raises ConfigError for a model or a context that cannot be
    served."""
    return _find(config)[1]


def open_runner(config: TorchEngineConfig) -> tuple[Runner, Execution]:
    """Return the runner of the configured model. Raises ConfigError as `find_execution` does."""
    model_config, execution, model_class = _find(config)
    if execution.forward == BUILT_IN:
        _log.info("model forward: model=%s forward=%s", config.model, execution.forward)
    else:
        _log.warning("model forward is slow: model=%s forward=%s reason=%s", config.model, *execution)
    return _runner(execution.forward, model_class, _fitting(model_config, model_class), config), execution


def chooses_experts(folder: Path) -> bool:
    """Return whether the model of a folder has layers with a router. False if its configuration cannot be read, which
    `_find` reports."""
    try:
        config = read_config(folder)
        with torch.device("meta"):
            return bool(expert_modules(auto_class(config).from_config(config)))
    except MODEL_ERRORS:
        return False


def _find(config: TorchEngineConfig) -> tuple[Any, Execution, Any]:
    """Return the model's configuration, its forward and its class."""
    folder = Path(config.model)
    try:
        model_config = read_config(folder)
    except ValueError as error:
        raise ConfigError(str(error), key="model") from error
    check_positions(model_config.get_text_config().to_dict(), config.context_max, model=str(folder), key=_CONTEXT_KEY)
    execution, model_class = _verdict(folder, model_config.to_json_string(), config.device, config.forward)
    return model_config, execution, model_class


@functools.lru_cache(maxsize=64)
def _verdict(folder: Path, content: str, device: str, wanted: str) -> tuple[Execution, Any]:
    """Return the forward and the class of the model whose configuration is `content`. Cached, because the result is a
    function of it."""
    del content
    config = read_config(folder)
    name = f"model_type `{config.model_type}` in {folder}"
    try:
        check = SelfCheck(reference_model(config), torch.device(device))
    except MODEL_ERRORS as error:
        raise ConfigError(
            f"`model`: transformers cannot run {name} as a causal language model: {_one_line(error)}", key="model"
        ) from error
    reasons: list[str] = []
    for forward in FORWARDS if wanted == "auto" else (wanted,):
        if not (reason := _problem(forward, check, device)):
            return Execution(forward, "; ".join(reasons)), type(check.model)
        reasons.append(f"{forward}: {reason}")
    raise ConfigError(
        f"`model`: {name} cannot be served, because no forward equals the plain one of transformers: "
        f"{'; '.join(reasons)}",
        key="model",
    )


def _problem(forward: str, check: SelfCheck, device: str) -> str:
    """Return why a small model of the same configuration cannot run with this forward; empty if it can."""
    model = check.model
    config = TorchEngineConfig(model="-", device=device, slots_max=SLOTS, context_max=check.context_max)
    try:
        runner = _runner(forward, type(model), model.config, config)
        difference = check.difference(runner, runner.lay_out(model.state_dict()))
    except (UnknownToDecoder, WeightsMismatch) as error:
        return str(error)
    except MODEL_ERRORS as error:
        return _one_line(error)
    return "" if difference <= TOLERANCE else f"log-probs differ by {difference:.2g} nats"


def _one_line(error: Exception) -> str:
    """Return an error of the model's code as one line. Raises it if memory ran out."""
    raise_if_out_of_memory(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def _fitting(config: Any, model_class: Any) -> Any:
    """Return the part of a composite configuration that the class takes."""
    return config if isinstance(config, model_class.config_class) else config.get_text_config()


def _runner(forward: str, model_class: Any, model_config: Any, config: TorchEngineConfig) -> Runner:
    dtype = getattr(torch, config.dtype)
    if forward == BUILT_IN:
        return TorchRunner(
            model_spec(model_config),
            slots=config.slots_max,
            context_max=config.context_max,
            device=config.device,
            dtype=dtype,
        )
    cached = forward == CACHED
    return PlainRunner(
        model_class, model_config, slots=config.slots_max, device=config.device, dtype=dtype, cached=cached
    )
