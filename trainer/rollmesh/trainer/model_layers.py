"""The decoder layers of a model, and gradient checkpointing: a backward pass that computes the inside of a layer again.

With gradient checkpointing (Chen et al., arXiv:1604.06174) the forward keeps only the input of each layer, so that the
inside of one layer exists at a time. It costs one more forward of the layers. transformers offers it for training mode
only, and the trainer runs models in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of the model in order, without modules inside other layers. Raises ValueError for a model
    without known layers."""
    named = set(model._no_split_modules or ())
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_layer = isinstance(module, GradientCheckpointingLayer) or type(module).__name__ in named
        if is_layer and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no layers of a kind that transformers names, so they cannot be computed one "
            "by one; set `learner.compute.gradient_checkpointing` to false and `learner.compute.ranks` to 1"
        )
    return list(found.values())


def checkpoint_layers(model: PreTrainedModel, contexts: Callable[[], Any] = noop_context_fn) -> None:
    """Make each layer discard what its backward needs and compute it again. Names of parameters and values do not
    change. `contexts` returns the contexts of a forward and of its repetition."""
    for layer in decoder_layers(model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
