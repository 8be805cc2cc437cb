"""Outputs of the routers of a mixture-of-experts model, and the comparison with the model's load-balancing loss.

A router is a layer that chooses `top_k` of its E experts for each token, by its logits. The load-balancing loss of
transformers (`router_aux_loss_coef`) pools all routers of a model: with f_e the mean number of routers' choices of
expert e per token and router, and P_e the mean of the softmax of its logits,

    E * sum over e of f_e P_e

which is `top_k` for even loads (Fedus et al., arXiv:2101.03961, equations 4 to 6). `losses/router.py` is the term of a
run.

Collaborators: `forward` (reads the outputs of the model), `router_features` (columns of the loss), `update` (calls the
comparison).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.trainer.model_config import text_config
from rollmesh.trainer.spread_model import MODEL_ERRORS, SpreadCopy, model_error

_TOLERANCE = 1e-4
"""Largest relative difference from the loss that the model computes."""


@dataclass(frozen=True, slots=True)
class RouterLogits:
    """Logits of all routers of a model at the same m tokens."""

    layers: tuple[Tensor, ...]
    """[m, E] per router, in order."""
    top_k: int
    """Experts that each router chooses for a token."""

    def at(self, rows: Tensor | slice) -> RouterLogits:
        """Return those of the tokens with these numbers [n]."""
        return RouterLogits(tuple(layer[rows] for layer in self.layers), self.top_k)

    def probabilities(self) -> Tensor:
        """Return [m, E] in float32: the softmax of the logits, averaged over the routers."""
        return sum((layer.float().softmax(-1) for layer in self.layers), torch.zeros(())) / len(self.layers)

    @torch.no_grad()
    def loads(self) -> Tensor:
        """Return [m, E] in float32: how many of the routers choose the expert, divided by their number. A row sums to
        `top_k`."""
        chosen = torch.zeros_like(self.layers[0], dtype=torch.float32)
        for layer in self.layers:
            chosen = chosen.scatter_add(
                -1, layer.topk(self.top_k, dim=-1).indices, chosen.new_ones(len(layer), self.top_k)
            )
        return chosen / len(self.layers)


def router_logits(model: PreTrainedModel, layers: Sequence[Tensor]) -> RouterLogits:
    """Return the router logits [m, E] that a forward with `output_router_logits` has returned. Raises ValueError if
    there are none."""
    top_k = getattr(text_config(model), "num_experts_per_tok", None)
    if not layers or top_k is None:
        raise ValueError(f"{type(model).__name__} has no routers: {_REMEDY}")
    return RouterLogits(tuple(layer.flatten(0, -2) for layer in layers), int(top_k))


def returned_layers(outputs: object) -> tuple[Tensor, ...]:
    """Return the router logits in the outputs of a forward, per router; empty if there are none."""
    return tuple(getattr(outputs, "router_logits", None) or ())


def check_router(model: PreTrainedModel, spread: SpreadCopy | None = None) -> None:
    """Raise ValueError unless the features give the load-balancing loss that the model itself computes for a few
    tokens.

    The loss is compared on the loaded weights, and on spread ones: routers that choose evenly have it in common with
    other losses. `spread` is the small copy of the model that several tests share."""
    _compare_loss(model)
    try:
        small = (spread or SpreadCopy(model)).model
    except MODEL_ERRORS as error:
        raise ValueError(
            f"{type(model).__name__}: no small model of its configuration can be made, on which its load-balancing "
            f"loss is compared ({model_error(error)}); {_REMEDY}"
        ) from error
    _compare_loss(small)


@torch.no_grad()
def _compare_loss(model: PreTrainedModel) -> None:
    name = type(model).__name__
    token_ids = torch.arange(8, device=model.device)[None] % int(text_config(model).vocab_size)
    outputs = model(input_ids=token_ids, use_cache=False, output_router_logits=True)
    router = router_logits(model, returned_layers(outputs))
    expected = getattr(outputs, "aux_loss", None)
    if expected is None:
        raise ValueError(f"{name} has no load-balancing loss in transformers: {_REMEDY}")
    found = float(balance(router.loads(), router.probabilities()))
    if not abs(found - float(expected)) <= _TOLERANCE * abs(float(expected)):
        raise ValueError(
            f"{name} computes another load-balancing loss than the loss term `router`: {float(expected)} instead of "
            f"{found} for 8 tokens; remove the term"
        )


def balance(loads: Tensor, probabilities: Tensor) -> Tensor:
    """Return the load-balancing loss of tokens whose loads and probabilities are [m, E]."""
    return loads.shape[-1] * (loads.mean(0) * probabilities.mean(0)).sum()


_REMEDY = "remove the loss term `router`, which is for mixtures of experts with `router_aux_loss_coef`"
