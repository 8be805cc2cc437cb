"""The shares of several sources in the draws of a run, and the source of each draw.

A weight is a number, or points between which it is linear; before the first point and after the last one it is
constant. It is a function of the draw, because each process knows the index of a draw, and a restart repeats it. The
share of source i is its weight in the sum of all, within bounds:

    s_i = clip(c w_i, floor_i, ceiling_i),    c such that the shares have the sum 1

The source of a draw is the one that lags most behind the sum of its shares (`in_proportion`). Measured on random
mixtures of 2 to 64 sources, the draws of a source differ from the sum of its shares by at most 1.1 with constant
weights, and by at most 1.7 up to the last point of steep schedules. After the last point, the order begins again and
repeats with a period of `PERIOD` draws, which gives any draw in constant time. Each period repeats the error of the
first one, so n draws after the last point add 1.1 (1 + n / `PERIOD`) at most. The error does not grow if all shares are
multiples of 1 / `PERIOD`. A smaller share than `SHARE_MIN` is rejected there, because it could never be drawn.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise, repeat
from typing import Annotated, NamedTuple

import numpy as np
from msgspec import Meta

from rollmesh.services.data.proportion import in_proportion
from rollmesh.services.data.selectors.base import Floats, Ints
from rollmesh.shared.config.settings import NonNegativeFloat, Settings, Share

PERIOD = 10_000
SHARE_MIN = 2 / PERIOD
"""Least share after the last point, except 0."""
SCHEDULE_DRAWS_MAX = 100_000
"""Largest draw of a point. The order of the draws up to the last point is made at once, when the data service starts,
and held in memory, 9 bytes per draw."""
ORDERS_KEPT_MAX = 8
"""Orders that a process keeps. The selectors of all runs and policies of a data service share one, because to make one
may take a second, for which no call may wait."""
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
        points = tuple((tuple(draws), tuple(weights)) for draws, weights in self._points)
        self._settings = (self.names, points, self._floors.tobytes(), self._ceilings.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shares) and self._settings == other._settings

    def __hash__(self) -> int:
        return hash(self._settings)

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
        last = self.at(np.array([self.end]))[0]
        for name, share, (_, weight), high in zip(self.names, last, self._points, self._ceilings, strict=True):
            if share < SHARE_MIN and (share > 0.0 or (weight[-1] > 0.0 and high > 0.0)):
                raise ValueError(
                    f"`weights.{name}` must give a share of 0 or >= {SHARE_MIN:g} after the last point, got {share:.3g}"
                )


class DrawnSource(NamedTuple):
    """The source of a draw."""

    source: int
    earlier: int
    """Number of earlier draws of this source."""


@lru_cache(maxsize=ORDERS_KEPT_MAX)
def source_order(shares: Shares) -> SourceOrder:
    """Return the order of these shares, which a process makes once."""
    return SourceOrder(shares)


class SourceOrder:
    """The source of each draw, which follows the shares."""

    def __init__(self, shares: Shares) -> None:
        num = len(shares.names)
        self._end = shares.end
        self._scheduled = _Order(num, chain.from_iterable(part.tolist() for part in shares.scheduled(shares.end)))
        self._constant = _Order(num, repeat(shares.at(np.array([shares.end]))[0].tolist(), PERIOD))

    def at(self, index: int) -> DrawnSource:
        """Return the source of a draw."""
        if index < self._end:
            return self._scheduled.at(index)
        periods, index = divmod(index - self._end, PERIOD)
        source, earlier = self._constant.at(index)
        earlier += periods * self._constant.totals[source]
        return DrawnSource(source, earlier + self._scheduled.totals[source])


class _Order:
    """The sources of draws, each with the shares of the sources."""

    def __init__(self, num_sources: int, rows: Iterable[Sequence[float]]) -> None:
        self._sources, self._earlier, self.totals = array("B"), array("q"), [0] * num_sources
        for source in in_proportion(rows):
            self._sources.append(source)
            self._earlier.append(self.totals[source])
            self.totals[source] += 1

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
