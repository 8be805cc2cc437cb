"""Sequences of tokens of which some are targets. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.domain.trajectory import IntArray, MaskArray


@dataclass(frozen=True, slots=True)
class Sequence1D:
    """One sequence. `target_mask` [n] is 1 where the log-prob of the token in `token_ids` [n] is wanted; entry 0 must
    be 0."""

    token_ids: IntArray
    target_mask: MaskArray

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
        return Sequence1D(self.token_ids, mask)


def num_targets(sequences: Sequence[Sequence1D]) -> int:
    return sum(int(s.target_mask.sum()) for s in sequences)
