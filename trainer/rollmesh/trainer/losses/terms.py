"""The loss of an update: the weighted sum of its terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from rollmesh.trainer.config import LossTerm
from rollmesh.trainer.losses.base import LOSSES, LossInputs, PolicyLoss, PreparedLoss, TokenStats


class LossSum:
    """Implements `PolicyLoss`. With several terms, the statistics of each have its name in front, as in `tis/weight_capped`."""

    def __init__(self, terms: Sequence[LossTerm], base_dir: str | Path | None = None) -> None:
        """Construct the terms. A user's file is relative to `base_dir`. Raises ConfigError for a name or an option."""
        self._terms: list[tuple[str, float, PolicyLoss]] = [
            (
                f"{term.short_name}/" if len(terms) > 1 else "",
                term.weight,
                LOSSES.make(term, base_dir),
            )
            for term in terms
        ]

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, _, loss in self._terms for name in loss.needs))

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the columns that the terms compute over all tokens of an optimizer step."""
        prepared = [loss.prepare(columns) for _, _, loss in self._terms if isinstance(loss, PreparedLoss)]
        return {name: values for found in prepared for name, values in found.items()}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        total, stats = inputs.logprobs.new_zeros(()), dict[str, Tensor]()
        for prefix, weight, loss in self._terms:
            value, found = loss(inputs)
            total = total + weight * value
            stats |= {f"{prefix}{name}": values for name, values in found.items()}
        return total, stats
