"""What estimator, loss terms and update rule have in common: the columns that they need, and memory. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollmesh.shared.config.plugin import Plugin, optional_attribute

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.features import FeatureRequest


class UpdatePart(Plugin):
    """Base of the parts of an update. A state is nested dictionaries and lists of numbers, strings and tensors."""

    @optional_attribute
    def needs(self) -> tuple[str, ...]:
        """Names of the columns that it reads beside those that every update has: outputs of the engine, and names of
        `features.py`."""
        return ()

    @optional_attribute
    def features(self) -> Mapping[str, FeatureRequest]:
        """Requests of further columns by name, see `features.py`. The reward service, which has no torch, does not read
        it."""
        return {}

    @optional_attribute
    def rewards(self) -> tuple[str, ...]:
        """Names of the rewards that it reads, which some scorer must give."""
        return ()

    @optional_attribute
    def needs_behavior(self) -> bool:
        """Whether it reads behavior log-probs. If so, it does not get tokens that were not sampled, such as those of a
        given solution, whose log-prob in the column `behavior` is NaN."""
        return True

    def state(self) -> dict[str, Any]:
        """Return the memory, which the checkpoint holds, so that a resumed run continues bit for bit. Without this
        method it has none."""
        raise NotImplementedError

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
