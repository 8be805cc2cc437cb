"""Draws by source: each source has a share of the draws, and a selector of its tasks.

`shares` describes weights, bounds and the order of the sources. The sources of a pool are the values of a label: by
default `source`, which the tasks of a mixture have. Draw k of a source is draw k of its selector, so `uniform` draws
each task of a source once per epoch of that source. Each selector sees its source as a whole pool: it gets the tasks in
flight and the results of its source only.

The share is of draws. A finalizer that filters groups, and a staleness bound that drops them, change the shares of the
trained groups. The metric `rollmesh_data_source_share_ratio` shows the requested and the decided shares, and
metrics.jsonl those of each update.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Annotated, Any, ClassVar, cast

import msgspec
import numpy as np
from msgspec import Meta

from rollmesh.services.data.labels import categories_of
from rollmesh.services.data.mixture_pool import SOURCE_LABEL, SOURCES_MAX
from rollmesh.services.data.selector import SELECTORS, GroupResult, Plan, Selector, SourceShare
from rollmesh.services.data.selectors.base import Ints, StoredSelector
from rollmesh.services.data.selectors.shares import Shares, Weight, source_order
from rollmesh.services.data.subpool import category_pools
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import SettingError, Settings, Share
from rollmesh.shared.errors import ConfigError, located_at

_KEY = "data.selector.options"


class MixtureSelectorOptions(Settings):
    """Settings of the selector of sources."""

    weights: Annotated[dict[str, Weight], Meta(min_length=1, max_length=SOURCES_MAX)]
    """Weight of each source, relative to the others: a number, or the points `{draw, weight}` of a schedule."""
    floor: dict[str, Share] = {}
    """Least share of a source, whatever the weights are. Default: 0."""
    ceiling: dict[str, Share] = {}
    """Greatest share of a source, whatever the weights are. Default: 1."""
    selector: Extension = Extension("uniform")
    """Selector of the tasks of each source."""
    selectors: dict[str, Extension] = {}
    """Selector of the tasks of a source, in place of `selector`."""
    label: str = SOURCE_LABEL
    """Task label whose values are the sources."""

    def check_fields(self) -> None:
        Shares(self.weights, self.floor, self.ceiling)
        if unknown := [name for name in self.selectors if name not in self.weights]:
            raise SettingError("selectors", f"must name sources of `weights`, got {', '.join(unknown)}")


class MixtureSelector(StoredSelector):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = MixtureSelectorOptions
    schema = "mixture@1"

    def __init__(self, *, pool: TaskPool, seed: int, options: MixtureSelectorOptions) -> None:
        """Raise ConfigError unless each source of the pool has a weight, and no other one has."""
        super().__init__(pool)
        self._options = options
        self._seed = seed
        found = categories_of(pool, options.label)
        names = found.names
        _check_names(names, options)
        self._shares = Shares(options.weights, options.floor, options.ceiling)
        self._order = source_order(self._shares)
        self._category = found.of_task
        self._place = np.array([self._shares.names.index(name) for name in names], dtype=np.uint8)
        """Source of each category."""
        pools = category_pools(pool, options.label)
        self._pools = [pools[names.index(name)] for name in self._shares.names]
        self._selectors = self._new_selectors()
        self._decided: Ints = np.zeros(len(names), dtype=np.int64)

    def draw(self, index: int, in_flight: AbstractSet[int]) -> int:
        source, earlier = self._order.at(index)
        pool = self._pools[source]
        return int(pool.positions[self._selectors[source].draw(earlier, self._taken(source, in_flight))])

    def plan(self, index: int, position: int, in_flight: AbstractSet[int]) -> Plan:
        source, earlier = self._order.at(index)
        plan = self._selectors[source].plan(
            earlier, self._pools[source].index(position), self._taken(source, in_flight)
        )
        return (
            plan
            if not plan.propensity
            else msgspec.structs.replace(
                plan, propensity=plan.propensity * float(self._shares.at(np.array([index]))[0][source])
            )
        )

    def _taken(self, source: int, in_flight: AbstractSet[int]) -> set[int]:
        """Return the positions in the pool of a source that are in flight."""
        taken = np.fromiter(in_flight, dtype=np.int64, count=len(in_flight))
        taken = taken[self._place[self._category[taken]] == source]
        return set(np.searchsorted(self._pools[source].positions, taken).tolist())

    def observe(self, result: GroupResult) -> None:
        source = self._source(result)
        self._decided[source] += 1
        self._selectors[source].observe(self._of_source(result))

    def observe_trained(self, result: GroupResult) -> None:
        self._selectors[self._source(result)].observe_trained(self._of_source(result))

    def source_shares(self, index: int) -> Iterable[SourceShare]:
        requested = self._shares.at(np.array([index]))[0]
        decided = self._decided / max(1, self._decided.sum())
        for name, *shares in zip(self._shares.names, requested, decided, strict=True):
            yield SourceShare(name, *map(float, shares))

    def stored(self) -> dict[str, Any]:
        return {
            "sources": list(self._shares.names),
            "selectors": [selector.snapshot() for selector in self._selectors],
            "decided": self._decided.tolist(),
        }

    def load(self, fields: Mapping[str, Any]) -> None:
        if fields["sources"] != list(self._shares.names):
            raise ValueError(f"the sources must be {list(self._shares.names)}, got {fields['sources']!r}")
        decided = np.array(fields["decided"], dtype=np.int64).reshape(len(self._pools))
        selectors = self._new_selectors()
        for selector, state in zip(selectors, fields["selectors"], strict=True):
            selector.restore(state)
        self._selectors, self._decided = selectors, decided

    def _source(self, result: GroupResult) -> int:
        """Return the index of the source of a group."""
        return int(self._place[self._category[result.position]])

    def _of_source(self, result: GroupResult) -> GroupResult:
        pool = self._pools[self._source(result)]
        return replace(result, position=pool.index(result.position))

    def _new_selectors(self) -> list[Selector]:
        """Return the selectors without results. Each has its own seed, so that equal sources are drawn differently."""
        made = []
        for name, pool in zip(self._shares.names, self._pools, strict=True):
            own = name in self._options.selectors
            chosen = self._options.selectors[name] if own else self._options.selector
            with located_at(f"{_KEY}.selectors.{name}" if own else f"{_KEY}.selector"):
                seed = zlib.crc32(f"{self._seed}/{name}".encode())
                made.append(cast(Selector, SELECTORS.make(chosen, pool=pool, seed=seed)))
        return made


def _check_names(found: Iterable[str], options: MixtureSelectorOptions) -> None:
    """Raise ConfigError unless the weights are those of the sources that the training pool has."""
    found, key = set(found), f"{_KEY}.weights"
    if found == {""}:
        raise ConfigError(
            f"`{_KEY}.label`: no training task has the label `{options.label}`; use the source `mixture`, or name a "
            "label of your tasks",
            key=f"{_KEY}.label",
        )
    if unknown := options.weights.keys() - found:
        raise ConfigError(
            f"`{key}` must name sources with training tasks, which are {_listed(found)}; got {_listed(unknown)}",
            key=key,
        )
    if missing := found - options.weights.keys():
        raise ConfigError(
            f"`{key}` must have a weight for each source with training tasks; add {_listed(missing)}, with 0 to "
            "draw none of it",
            key=key,
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))
