"""The order of several things in proportion to their weights (smooth weighted round robin)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence


def in_proportion(rows: Iterable[Sequence[float]]) -> Iterator[int]:
    """Yield an index for each row of weights: the one that lags most behind the sum of its shares, among those with a
    weight > 0. Equal weights give 0, 1, 2, ..."""
    lag: list[float] = []
    for weights in rows:
        lag = lag or [0.0] * len(weights)
        chosen, most = 0, -math.inf
        for index, weight in enumerate(weights):
            lag[index] += weight
            if weight > 0.0 and lag[index] > most:
                chosen, most = index, lag[index]
        lag[chosen] -= sum(weights)
        yield chosen
