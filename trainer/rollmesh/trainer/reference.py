"""The reference model: frozen weights that features are computed under.

`initial` are the weights with which the run began, `path` those of a folder, and `average` a moving average of the policy's weights
(Polyak & Juditsky 1992): after each applied update, w_ref = decay * w_ref + (1 - decay) * w.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.config import ReferenceConfig
from rollmesh.trainer.model_files import load_model


class Reference:
    """A model without gradient."""

    def __init__(self, model: PreTrainedModel, decay: float | None) -> None:
        """`decay` is set for a moving average."""
        self.model = model.requires_grad_(False)
        self.model.train(False)
        self._decay = decay

    @torch.no_grad()
    def follow(self, policy: PreTrainedModel) -> None:
        """Move an average towards the policy. Other references stay."""
        if self._decay is None:
            return
        for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.lerp_(theirs, 1.0 - self._decay)

    def state(self) -> dict[str, Tensor] | None:
        """Return the weights of an average for the checkpoint; None for a reference that is loaded again."""
        return None if self._decay is None else dict(self.model.state_dict())

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        if self._decay is not None:
            self.model.load_state_dict(state)


def open_reference(
    config: ReferenceConfig, policy: PreTrainedModel, initial: Callable[[], PreTrainedModel] | None
) -> Reference:
    """Return the reference for `policy`. Without `initial`, the policy has the initial weights. Raises ConfigError."""
    if config.kind == "average":
        return Reference(copy.deepcopy(policy), config.decay)
    try:
        if config.kind == "path":
            model = load_model(Path(config.path), device=str(policy.device))
        else:
            model = copy.deepcopy(policy) if initial is None else initial()
    except (ValueError, OSError) as err:
        raise ConfigError(
            f"`learner.reference`: the reference model ({config.kind}) cannot be loaded: {err}; name a folder with a model in "
            "transformers format, or choose another kind",
            key="learner.reference",
        ) from err
    check_same_family(model.config, policy.config)
    return Reference(model, None)


def check_same_family(reference: Any, policy: Any) -> None:
    """Raise ConfigError if the configurations of two models differ in architecture or vocabulary. The sizes may differ.

    The architecture decides which forward computes the log-probs of the policy, and the reference runs through the same one.
    """
    mine, theirs = reference.get_text_config(decoder=True), policy.get_text_config(decoder=True)
    key = "learner.reference"
    if mine.model_type != theirs.model_type:
        raise ConfigError(
            f"`{key}`: the architecture of the reference is {mine.model_type}, that of the policy {theirs.model_type}; choose a model of "
            "the same architecture",
            key=key,
        )
    if mine.vocab_size != theirs.vocab_size:
        raise ConfigError(
            f"`{key}`: the vocabulary of the reference has {mine.vocab_size} tokens, that of the policy {theirs.vocab_size}; choose a model "
            "with the same tokenizer",
            key=key,
        )
