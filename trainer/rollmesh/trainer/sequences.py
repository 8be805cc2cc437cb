"""Sequences of tokens of which some are targets. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.domain.trajectory import IntArray, MaskArray


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts that the routers of an engine have chosen for n tokens, see `routes`."""

    experts: NDArray[Any]
    """[n, k] integers, router by router; without meaning for a token without a record."""
    recorded: NDArray[np.bool_]
    """[n]: whether the token has a record."""


@dataclass(frozen=True, slots=True)
class Sequence1D:
    """One sequence. `target_mask` [n] is 1 where the log-prob of the token in `token_ids` [n] is wanted; entry 0 must
    be 0. `routes` are those to replay, if any."""

    token_ids: IntArray
    target_mask: MaskArray
    routes: Routes | None = None

    def __post_init__(self) -> None:
        if self.token_ids.shape != self.target_mask.shape or self.token_ids.size == 0:
            raise ValueError(
                "a sequence must have as many mask entries as token ids, and at least one, got "
                f"{self.target_mask.size} and {self.token_ids.size}"
            )
        if self.target_mask[0]:
            raise ValueError("the first token of a sequence cannot be a target, because no token before it predicts it")

    def without(self, excluded: NDArray[np.bool_]) -> Sequence1D:
        """Return the sequence without the targets where `excluded` [number of targets] is True."""
        mask = self.target_mask.copy()
        mask[np.flatnonzero(mask)[excluded]] = 0
        return replace(self, target_mask=mask)


def num_targets(sequences: Sequence[Sequence1D]) -> int:
    return sum(int(s.target_mask.sum()) for s in sequences)
