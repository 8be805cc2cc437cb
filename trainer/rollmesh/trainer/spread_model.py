"""Make a small model of a configuration with spread random weights, on which two forwards are compared.

Weights as they are found can hide a difference. Those of a new model are so small that a cap of the logits does
nothing, and a layer that begins as zeros passes its input on. Spread weights make every cap, norm, scale and window
change the result.

A large model is cut: few layers of every type, a small vocabulary, few heads, experts and channels. The size of a head,
the choices of a router and all numbers that scale a value stay, because a forward can depend on them. A cut with which
the model cannot run is not made.
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

MODEL_ERRORS = (
    AttributeError, IndexError, KeyError, MemoryError, NotImplementedError, RuntimeError, TypeError, ValueError
)  # fmt: skip
"""What the code of a model raises for a configuration or a forward that it does not support. Pass each of them to
`model_error`."""
_MEMORY_RAN_OUT = "memory ran out while the forward of the model was tested"
_GAIN = 2.5
"""Large enough that attention scores reach the nonlinear range of a cap of 50."""
_WHOLE_PARAMETERS = 50_000_000
_VOCAB = 1024
_LAYERS = 2
_HEADS = 4
_INNER = 256
"""Channels within a feed-forward layer or an expert."""
_TOKENS = 8
"""Tokens of the forward that shows whether a cut model runs."""
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads")
_LIKE_HIDDEN = ("word_embed_proj_dim", "dim_model_base", "mamba_n_heads", "mamba_d_ssm")
"""Sizes that a model uses in proportion to its hidden size."""
_INNERS = (
    "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size", "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")


class SpreadCopy:
    """The `spread_model` of the class and configuration of a model, on its device. It is made when it is first used,
    and once."""

    def __init__(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """`device` is by default the one on which the model computes."""
        self._original = model
        self._device = device

    @cached_property
    def model(self) -> PreTrainedModel:
        """The copy. Raises one of MODEL_ERRORS."""
        original = self._original
        made = spread_model(original.config, type(original)._from_config)
        copied: PreTrainedModel = made.to(self._device or compute_device(original))
        return copied


def spread_model(config: Any, make: Callable[..., Any]) -> Any:
    """Return a float32 model in evaluation mode, which `make(config, dtype=...)` makes of a copy of the configuration.

    A model with more than `_WHOLE_PARAMETERS` parameters is cut. Random generators do not change.
    """
    with torch.device("meta"):
        whole = make(copy.deepcopy(config))
    if sum(parameter.numel() for parameter in whole.parameters()) <= _WHOLE_PARAMETERS:
        return _made(copy.deepcopy(config), make)
    shallow = _shallow(config, whole)
    if (model := _running(_narrowed(shallow, _CUTS), make)) is not None:
        return model
    kept: list[_Cut] = []
    for cut in (cut for cut in _CUTS if cut(shallow.get_text_config())):
        if _running(_narrowed(shallow, [*kept, cut]), make) is not None:
            kept.append(cut)
    return _made(_narrowed(shallow, kept), make)


def model_error(error: Exception) -> str:
    """Return an error of the code of a model as one line. Raises it with a remedy if memory ran out, which says nothing
    about the model."""
    raise_if_out_of_memory(error)
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def raise_if_out_of_memory(error: Exception) -> None:
    """Raise the error with a remedy if memory ran out. An error that has the remedy is raised unchanged."""
    if is_out_of_memory(error):
        if str(error).startswith(_MEMORY_RAN_OUT):
            raise error
        kind = torch.OutOfMemoryError if isinstance(error, torch.OutOfMemoryError) else MemoryError
        raise kind(
            f"{_MEMORY_RAN_OUT}, so that the result is not known: {error}; free memory on the device, or choose a "
            "device with more memory or a smaller model"
        ) from error


def _made(config: Any, make: Callable[..., Any]) -> Any:
    """Return the model of the configuration with spread weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                _spread(parameter)
    return model


def _running(config: Any, make: Callable[..., Any]) -> Any:
    """Return the model of the configuration; None if it cannot be made or raises for a few tokens."""
    try:
        model = _made(config, make)
        with torch.no_grad():
            model(input_ids=torch.arange(_TOKENS)[None], use_cache=False)
    except MODEL_ERRORS as error:
        raise_if_out_of_memory(error)
        return None
    return model


def _shallow(config: Any, whole: Any) -> Any:
    """Return the configuration with few layers of every type and a small vocabulary. Towers of other inputs get one
    layer.

    `whole` is the model of the configuration. A type of layer is what the configuration says of it, and the classes of
    its modules.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for other in [part for name in config.sub_configs if (part := getattr(config, name, None)) not in (None, text)]:
        for name in {"depth", "num_hidden_layers"} & set(other.to_dict()):
            setattr(other, name, 1)
    num = int(text.num_hidden_layers)
    per_layer = {name: value for name, value in text.to_dict().items() if isinstance(value, list) and len(value) == num}
    stacks = [module for module in whole.modules() if isinstance(module, nn.ModuleList) and len(module) == num]
    kinds = [[{type(part) for part in layer.modules()} for layer in stack] for stack in stacks]
    kept = min(num, _LAYERS)
    for value in (*per_layer.values(), *kinds):
        first = {value.index(item) for item in value}
        kept = max(kept, 1 + max(first)) if len(first) < num else kept  # else the items number the layers
    for name, value in per_layer.items():
        setattr(text, name, value[:kept])
    text.num_hidden_layers = kept
    text.vocab_size = min(int(text.vocab_size), _VOCAB)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if (token := getattr(text, name, None)) is not None:
            setattr(text, name, _capped(token, text.vocab_size - 1))
    return config


def _narrowed(config: Any, cuts: Sequence[_Cut]) -> Any:
    """Return the configuration with these cuts of its text part."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    for cut in cuts:
        for name, value in cut(text).items():
            setattr(text, name, value)
    return config


def _cut_heads(text: Any) -> dict[str, Any]:
    """Cut the heads to four, with half as many of keys and values if they share them, and the hidden size in
    proportion. A head keeps its size."""
    heads, hidden = (getattr(text, name, None) for name in ("num_attention_heads", "hidden_size"))
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads <= _HEADS:
        return {}
    changes = {"num_attention_heads": _HEADS, "hidden_size": hidden // heads * _HEADS}
    for name in _KV_HEADS:
        if isinstance(value := getattr(text, name, None), int):
            changes[name] = _HEADS if value == heads else min(value, _HEADS // 2)
    for name in _LIKE_HIDDEN:
        if isinstance(value := getattr(text, name, None), int):
            changes[name] = max(1, value * changes["hidden_size"] // hidden)
    return changes


def _cut_inner(text: Any) -> dict[str, Any]:
    """Cut the channels within feed-forward layers and experts."""
    return {name: _capped(value, _INNER) for name in _INNERS if (value := getattr(text, name, None)) is not None}


def _cut_experts(text: Any) -> dict[str, Any]:
    """Keep twice as many experts as a router chooses, in whole groups. The number of those that it chooses stays."""
    chosen = next((value for name in _CHOSEN if isinstance(value := getattr(text, name, None), int)), 0)
    groups, chosen_groups = (int(getattr(text, name, None) or 1) for name in ("n_group", "topk_group"))
    in_group = max(2, -(-2 * chosen // chosen_groups))
    names = [name for name in _EXPERTS if isinstance(getattr(text, name, None), int)] if chosen else []
    return {name: min(getattr(text, name), groups * in_group) for name in names}


def _capped(value: Any, limit: int) -> Any:
    """Return a number or a list of numbers of at most `limit`."""
    return [min(item, limit) for item in value] if isinstance(value, list) else min(value, limit)


_Cut = Callable[[Any], dict[str, Any]]
_CUTS: tuple[_Cut, ...] = (_cut_heads, _cut_inner, _cut_experts)


def _spread(parameter: torch.Tensor) -> None:
    """Scale matrices so that activations stay near 1, and add noise to vectors."""
    if parameter.dim() < 2:
        parameter.add_(0.1 * torch.randn_like(parameter))
    elif parameter.std() > 0:
        parameter.mul_(_GAIN / (math.sqrt(parameter.shape[-1]) * parameter.std()))
    else:
        parameter.add_(torch.randn_like(parameter) / math.sqrt(parameter.shape[-1]))
