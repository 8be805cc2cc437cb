"""The shares of several sources in the draws of a run, and the source of each draw.

A weight is a number, or points between which it is linear; before the first point and after the last one it is
constant. It is a function of the draw, because each process knows the index of a draw, and a restart repeats it. The
share of source i is its weight in the sum of all, within bounds:

    s_i = clip(c w_i, floor_i, ceiling_i),    c such that the shares have the sum 1

The source of a draw is the one that lags most behind the sum of its shares (smooth weighted round robin). In each
prefix of the draws, a source differs from the sum of its shares by less than 1 draw with up to 5 sources, and by less
than 1.2 with up to 64 (measured on 20 to 60 random mixtures of each size). After the last point, the order begins
again, so these errors add up there, and it repeats with a period of `PERIOD` draws. This gives any draw in constant
time, at an error of at most 1 in `PERIOD`, and none for shares that are multiples of 1 / `PERIOD`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from rollmesh.services.data.selectors.base import Floats, Ints
from rollmesh.shared.config.settings import NonNegativeFloat, Settings, Share

PERIOD = 10_000
SCHEDULE_DRAWS_MAX = 1_000_000
"""Largest draw of a point. The order of the draws up to the last point is held in memory, 9 bytes per draw."""
_ROWS = 4096
_HALVINGS = 64
_WEIGHT_MIN = 1e-9
"""Weights are scaled to the sum 1; a smaller one counts as 0."""


class WeightPoint(Settings):
    """A point of a schedule."""

    draw: Annotated[int, Meta(ge=0, le=SCHEDULE_DRAWS_MAX)]
    """Index of the draw, 0-based. A draw becomes a group of training episodes."""
    weight: NonNegativeFloat
    """Weight at that draw."""


Weight = NonNegativeFloat | tuple[WeightPoint, ...]


class Shares:
    """The share of each source by draw."""

    def __init__(
        self, weights: Mapping[str, Weight], floors: Mapping[str, Share], ceilings: Mapping[str, Share]
    ) -> None:
        """Raise ValueError if the weights, or the bounds, leave a draw without shares."""
        self.names = tuple(weights)
        self._points = [_points(name, weight) for name, weight in weights.items()]
        self._floors: Floats = np.array([floors.get(name, 0.0) for name in weights])
        self._ceilings: Floats = np.array([ceilings.get(name, 1.0) for name in weights])
        self.end = max((draws[-1] for draws, _ in self._points), default=0)
        """The last draw of a point. The shares are constant from here on."""
        self._check(floors, ceilings)

    def at(self, draws: Ints) -> Floats:
        """Return the shares [n, sources] of these draws [n]."""
        return _within(self._weights(draws), self._floors, self._ceilings)

    def scheduled(self, num: int) -> Iterator[Floats]:
        """Yield the shares of the first `num` draws, up to the last point, in parts of [n, sources]."""
        num = min(num, self.end)
        for first in range(0, num, _ROWS):
            yield self.at(np.arange(first, min(first + _ROWS, num)))

    def mean(self, num: int) -> Floats:
        """Return the mean shares [sources] of the first `num` draws. Without draws, those of the first one."""
        constant = self.at(np.array([self.end]))[0] * max(0, num - self.end)
        total: Floats = sum((part.sum(axis=0) for part in self.scheduled(num)), constant)
        return total / num if num else self.at(np.array([0]))[0]

    def _weights(self, draws: Ints) -> Floats:
        """Return the weights, scaled to the sum 1. All are 0 if the sum is."""
        weights: Floats = np.stack([np.interp(draws, *points) for points in self._points], axis=1)
        weights /= np.maximum(weights.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
        return np.where(weights < _WEIGHT_MIN, 0.0, weights)

    def _check(self, floors: Mapping[str, Share], ceilings: Mapping[str, Share]) -> None:
        for field, bounds in (("floor", floors), ("ceiling", ceilings)):
            if unknown := [name for name in bounds if name not in self.names]:
                raise ValueError(f"`{field}` must name sources of `weights`, got {', '.join(unknown)}")
        for name, low, high in zip(self.names, self._floors, self._ceilings, strict=True):
            if low > high:
                raise ValueError(f"`floor.{name}` must be <= its ceiling {high:g}, got {low:g}")
        if self._floors.sum() > 1.0 + 1e-9:
            raise ValueError(f"`floor` must have a sum <= 1, got {self._floors.sum():g}")
        # Between two points, the set of weights above 0 is the same at each draw.
        points = {0, *(int(draw) for draws, _ in self._points for draw in draws)}
        draws = np.array(sorted({near for draw in points for near in (draw - 1, draw, draw + 1) if near >= 0}))
        weights = self._weights(draws)
        if not (some := weights.any(axis=1)).all():
            raise ValueError(f"`weights` must not all be 0, but are at draw {draws[~some][0]}")
        most = np.where(weights > 0.0, self._ceilings, self._floors).sum(axis=1)
        if most.min() < 1.0 - 1e-9:
            raise ValueError(
                "`ceiling` of the sources with a weight above 0 and `floor` of the others must have a sum >= 1, got "
                f"{most.min():g} at draw {draws[most.argmin()]}"
            )


class DrawnSource(NamedTuple):
    """The source of a draw."""

    source: int
    earlier: int
    """Number of earlier draws of this source."""


class SourceOrder:
    """The source of each draw, which follows the shares."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares

    def at(self, index: int) -> DrawnSource:
        """Return the source of a draw."""
        end = self._shares.end
        if index < end:
            return self._scheduled.at(index)
        periods, index = divmod(index - end, PERIOD)
        source, earlier = self._constant.at(index)
        earlier += periods * self._constant.totals[source]
        return DrawnSource(source, earlier + self._scheduled.totals[source])

    @cached_property
    def _scheduled(self) -> _Order:
        parts = self._shares.scheduled(self._shares.end)
        return _Order(np.concatenate([np.empty((0, len(self._shares.names))), *parts]))

    @cached_property
    def _constant(self) -> _Order:
        return _Order(np.repeat(self._shares.at(np.array([self._shares.end])), PERIOD, axis=0))


class _Order:
    """The sources of draws with these shares, [draws, sources]."""

    def __init__(self, shares: Floats) -> None:
        lag, totals = [0.0] * shares.shape[1], [0] * shares.shape[1]
        sources, earlier = array("B"), array("q")
        for row in shares.tolist():
            chosen, most = 0, -math.inf
            for source, share in enumerate(row):
                lag[source] += share
                if share > 0.0 and lag[source] > most:
                    chosen, most = source, lag[source]
            lag[chosen] -= 1.0
            sources.append(chosen)
            earlier.append(totals[chosen])
            totals[chosen] += 1
        self._sources, self._earlier, self.totals = sources, earlier, totals

    def at(self, draw: int) -> DrawnSource:
        return DrawnSource(self._sources[draw], self._earlier[draw])


def _points(name: str, weight: Weight) -> tuple[Sequence[int], Sequence[float]]:
    """Return draws and weights of a schedule, or of a constant weight. Raise ValueError unless the draws ascend."""
    if not isinstance(weight, tuple):
        if not math.isfinite(weight):
            raise ValueError(f"`weights.{name}` must be finite, got {weight}")
        return (0,), (weight,)
    draws = [point.draw for point in weight]
    if not draws or any(later <= earlier for earlier, later in pairwise(draws)):
        raise ValueError(f"`weights.{name}` must have points with ascending draws, got {draws}")
    return draws, [point.weight for point in weight]


def _within(weights: Floats, floors: Floats, ceilings: Floats) -> Floats:
    """Return shares [n, sources] within bounds, with the sum 1 per row. `weights` have the sum 1."""
    if ((weights >= floors) & (weights <= ceilings)).all():
        return weights
    above = np.divide(ceilings, weights, out=np.zeros_like(weights), where=weights > 0.0).max(axis=1)
    below = np.zeros_like(above)
    for _ in range(_HALVINGS):  # the sum ascends with the factor
        middle = (below + above) / 2.0
        too_small = np.clip(middle[:, None] * weights, floors, ceilings).sum(axis=1) < 1.0
        below, above = np.where(too_small, middle, below), np.where(too_small, above, middle)
    shares: Floats = np.clip(above[:, None] * weights, floors, ceilings)
    return shares
