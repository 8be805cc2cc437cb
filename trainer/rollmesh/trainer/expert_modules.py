"""The modules of a model that compute its experts, and what a router has chosen for them.

transformers calls each of them with the states [n, d], the ids of the chosen experts [n, k], and their weights [n, k].

Collaborators: `router_replay`, and the engine's runner, which records the ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_IDS = ("top_k_index", "router_indices")
"""Names that these modules give to the ids, their second argument."""
_WEIGHTS = ("top_k_weights", "routing_weights")
"""Names that they give to the weights, their third argument."""


def expert_modules(model: nn.Module) -> list[Any]:
    """Return the modules that are called with the ids of chosen experts, in the order of the layers."""
    return [module for module in model.modules() if set(_IDS) & set(inspect.signature(module.forward).parameters)]


def chosen_experts(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """Return the ids [n, k] in the arguments of a call of such a module."""
    return _argument(1, _IDS, arguments, named)


def expert_weights(arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    """Return the weights [n, k] in the arguments of a call of such a module."""
    return _argument(2, _WEIGHTS, arguments, named)


def _argument(place: int, names: tuple[str, ...], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Tensor:
    found: Tensor = arguments[place] if len(arguments) > place else next(named[name] for name in names if name in named)
    return found
