"""The reference model: frozen weights that features are computed under.

`initial` are the weights with which the run began, `path` those of a folder, and `average` a moving average of the
policy's weights (Polyak & Juditsky 1992): after each applied update, w_ref = decay * w_ref + (1 - decay) * w.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.config import ReferenceConfig
from rollmesh.trainer.lora import Adapters
from rollmesh.trainer.model_config import compute_device, use_whole_attention
from rollmesh.trainer.model_files import open_model
from rollmesh.trainer.ranks import ONE_RANK, Ranks
from rollmesh.trainer.sharding import assign, empty_model, local, parts_on_first, unsharded_class


class Reference:
    """A model without gradient."""

    def __init__(self, model: PreTrainedModel, decay: float | None) -> None:
        """`decay` is set for a moving average."""
        self.model = model.requires_grad_(False)
        self.model.train(False)
        use_whole_attention(model)
        self._decay = decay

    @property
    def averages(self) -> bool:
        """Whether a checkpoint holds its weights."""
        return self._decay is not None

    @contextmanager
    def used(self) -> Iterator[PreTrainedModel]:
        """Yield the model, whose weights are those of the reference inside."""
        yield self.model

    @torch.no_grad()
    def follow(self, policy: PreTrainedModel) -> None:
        """Move an average towards the policy. Other references stay."""
        if self._decay is None:
            return
        for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            part = local(mine)
            part.lerp_(local(theirs).to(part.device), 1.0 - self._decay)

    def state(self, *, keep: bool = True) -> dict[str, Tensor] | None:
        """Return the weights of an average for the checkpoint; None for a reference that is loaded again.

        Every rank must call it; with `keep` False a rank only contributes its parts, one tensor at a time."""
        if self._decay is None:
            return None
        found = {}
        for name, values in self.model.state_dict().items():
            parts = parts_on_first(values.detach())
            if keep:
                found[name] = parts[0] if len(parts) == 1 else torch.cat(parts).cpu()
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` has returned. Every rank reads its part of the tensors."""
        if self._decay is not None:
            for name, target in self.model.state_dict().items():
                assign(target, state[name], state[name].shape)


class AdaptersOff(Reference):
    """The initial weights of a policy with adapters: the policy without them, so that there is no second model in
    memory."""

    def __init__(self, policy: PreTrainedModel, adapters: Adapters) -> None:
        self.model = policy
        self._adapters = adapters
        self._decay = None

    @contextmanager
    def used(self) -> Iterator[PreTrainedModel]:
        with self._adapters.off():
            yield self.model


def open_reference(
    config: ReferenceConfig,
    policy: PreTrainedModel,
    initial: Callable[[], PreTrainedModel] | None,
    adapters: Adapters | None = None,
    ranks: Ranks = ONE_RANK,
) -> Reference:
    """Return the reference for `policy`. Without `initial`, the policy has the initial weights. Raises ConfigError.

    With several ranks the policy is divided already. The reference is whole on rank 0 and without values on the others,
    and a copy of the policy is without values on all of them."""
    if adapters is not None and config.kind == "initial":
        return AdaptersOff(policy, adapters)
    if config.kind == "average":
        return Reference(_copy(policy, ranks), config.decay)
    try:
        if config.kind == "path":
            model = open_model(Path(config.path), device=str(compute_device(policy)), ranks=ranks)
        else:
            model = _copy(policy, ranks) if initial is None else initial()
    except (ValueError, OSError) as err:
        raise ConfigError(
            f"`learner.reference`: the reference model ({config.kind}) cannot be loaded: {err}; name a folder with a "
            "model in transformers format, or choose another kind",
            key="learner.reference",
        ) from err
    check_same_family(model.config, policy.config)
    return Reference(model, None)


def _copy(policy: PreTrainedModel, ranks: Ranks) -> PreTrainedModel:
    return copy.deepcopy(policy) if ranks.size == 1 else empty_model(unsharded_class(policy), policy.config)


def check_same_family(reference: Any, policy: Any) -> None:
    """Raise ConfigError if the configurations of two models differ in architecture or vocabulary. The sizes may differ.

    The architecture decides which forward computes the log-probs of the policy, and the reference runs through the same
    one.
    """
    mine, theirs = reference.get_text_config(decoder=True), policy.get_text_config(decoder=True)
    key = "learner.reference"
    if mine.model_type != theirs.model_type:
        raise ConfigError(
            f"`{key}`: the architecture of the reference is {mine.model_type}, that of the policy {theirs.model_type}; "
            "choose a model of the same architecture",
            key=key,
        )
    if mine.vocab_size != theirs.vocab_size:
        raise ConfigError(
            f"`{key}`: the vocabulary of the reference has {mine.vocab_size} tokens, that of the policy "
            f"{theirs.vocab_size}; choose a model with the same tokenizer",
            key=key,
        )
