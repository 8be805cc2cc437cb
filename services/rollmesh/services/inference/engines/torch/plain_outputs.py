"""Observe a forward of any transformers model from outside: the state that its head reads, and the experts that its
routers choose.

Hooks exist only while a request with such an output is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollmesh.services.inference.engines.common.sampling import half
from rollmesh.trainer.expert_modules import chosen_experts, expert_modules


@contextmanager
def observed(model: Any, outputs: tuple[str, ...]) -> Iterator[dict[str, Tensor]]:
    """Yield a dictionary that a forward of one sequence fills: `hidden` [n, d] and `routed_experts` [n, layers *
    chosen], if they are in `outputs`. n is the number of tokens whose logits the forward returns, or of all its
    tokens."""
    seen: dict[str, Tensor] = {}
    handles = []

    def head(_: Any, arguments: tuple[Any, ...]) -> None:
        seen["hidden"] = half(arguments[0].reshape(-1, arguments[0].shape[-1]))

    def experts(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = chosen_experts(arguments, named).to(torch.uint8 if module.num_experts <= 256 else torch.int32)
        seen["routed_experts"] = torch.cat((seen["routed_experts"], ids), dim=-1) if "routed_experts" in seen else ids

    if "hidden" in outputs:
        handles.append(model.get_output_embeddings().register_forward_pre_hook(head))
    if "routed_experts" in outputs:
        handles += [module.register_forward_pre_hook(experts, with_kwargs=True) for module in expert_modules(model)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
