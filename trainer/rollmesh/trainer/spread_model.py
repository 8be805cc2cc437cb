"""Make a small model of a configuration with spread random weights, on which two forwards are compared.

Weights as they are found can hide a difference. Those of a new model are so small that a cap of the logits does nothing, and a layer that
begins as zeros passes its input on. Spread weights make every cap, norm, scale and window change the result.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rollmesh.shared.config.user_code import is_out_of_memory
from rollmesh.trainer.model_config import compute_device

MODEL_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What the code of a model raises for a configuration or a forward that it does not support."""
_GAIN = 2.5
"""Large enough that attention scores reach the nonlinear range of a cap of 50."""
_WHOLE_PARAMETERS = 50_000_000
_VOCAB = 1024
_LAYERS = 2


def spread_model(config: Any, make: Callable[..., Any]) -> Any:
    """Return a float32 model in evaluation mode, which `make(config, dtype=...)` makes of a copy of the configuration.

    A model with more than `_WHOLE_PARAMETERS` parameters is cut in depth and vocabulary. Random generators do not change.
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        whole = make(copy.deepcopy(config))
    if sum(parameter.numel() for parameter in whole.parameters()) > _WHOLE_PARAMETERS:
        config = _cut(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                _spread(parameter)
    return model


def spread_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return the `spread_model` of the class and configuration of `model`, on its device. Raises one of MODEL_ERRORS."""
    small: PreTrainedModel = spread_model(model.config, type(model)._from_config).to(compute_device(model))
    return small


def _cut(config: Any) -> Any:
    """Return the configuration with few layers of every type and a small vocabulary. Towers of other inputs get one layer."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for other in [part for name in config.sub_configs if (part := getattr(config, name, None)) not in (None, text)]:
        for name in {"depth", "num_hidden_layers"} & set(other.to_dict()):
            setattr(other, name, 1)
    num = int(text.num_hidden_layers)
    per_layer = {name: value for name, value in text.to_dict().items() if isinstance(value, list) and len(value) == num}
    kept = min(num, _LAYERS)
    for value in per_layer.values():
        kept = max(kept, 1 + max(value.index(item) for item in value))
    for name, value in per_layer.items():
        setattr(text, name, value[:kept])
    text.num_hidden_layers = kept
    text.vocab_size = min(int(text.vocab_size), _VOCAB)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, name, None)
    return config


def _spread(parameter: torch.Tensor) -> None:
    """Scale matrices so that activations stay near 1, and add noise to vectors."""
    if parameter.dim() < 2:
        parameter.add_(0.1 * torch.randn_like(parameter))
    elif parameter.std() > 0:
        parameter.mul_(_GAIN / (math.sqrt(parameter.shape[-1]) * parameter.std()))
    else:
        parameter.add_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))
