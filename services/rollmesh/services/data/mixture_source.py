"""A source that has the tasks of several sources:

    data:
      source:
        name: mixture
        options:
          sources:
            sums: {source: calc, agent: calculator, scorers: [correct]}
            tables: {source: {name: sql, options: {level_max: 3}}, agent: writer, splits: [train]}

Each source is made as if it was `data.source`. `mixture_pool` describes the order, the ids and the labels. References
to answer keys stay those of the source, so each scorer reads what it reads without a mixture. Held-out tasks are those
that the sources hold out: give equal shares to sources that may have the same prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from rollmesh.services.data.mixture_pool import SOURCE_LABEL, SOURCES_MAX, MixturePart, MixturePool
from rollmesh.services.data.source import SOURCES, TaskSource, open_pools
from rollmesh.services.data.task import PoolTask, Split, TaskPool
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import SettingError, Settings
from rollmesh.shared.endpoints.answer import AsksBlocking
from rollmesh.shared.errors import ConfigError, located_at

MIXTURE = "mixture"
_NAME = re.compile("[A-Za-z0-9_-]{1,64}")


class MixtureEntry(Settings):
    """A source of a mixture."""

    source: Extension
    """The source, as in `data.source`, but not a mixture."""
    agent: str = ""
    """Name of the agent of the tasks that name none, an entry of `rollout.agents`. Empty means the default agent."""
    scorers: tuple[str, ...] = ()
    """Names of the rewards that score the tasks that name none. Empty means all."""
    splits: Annotated[tuple[Split, ...], Meta(min_length=1)] = tuple(Split)
    """Splits whose tasks are used. `[train]` excludes the source from evaluations."""


class MixtureOptions(Settings):
    """Settings of the source of several sources."""

    sources: Annotated[dict[str, MixtureEntry], Meta(min_length=1, max_length=SOURCES_MAX)]
    """Sources by name: 1 to 64 letters, digits, `_` and `-`. The name is the label `source` of their tasks."""

    def check_fields(self) -> None:
        for name, entry in self.sources.items():
            if not _NAME.fullmatch(name):
                raise SettingError("sources", f"must have names that match {_NAME.pattern}, got {name!r}")
            for field, values in (("splits", entry.splits), ("scorers", entry.scorers)):
                if len(set(values)) < len(values):
                    raise SettingError(f"sources.{name}.{field}", f"must have different names, got {', '.join(values)}")


class MixtureSource(TaskSource):
    """See the module."""

    Options = MixtureOptions

    def __init__(self, *, options: MixtureOptions, base_dir: str | Path | None = None) -> None:
        """Raise ConfigError if an entry is a mixture, or does not exist."""
        self._entries = options.sources
        self._base_dir = base_dir
        self._endpoints: AsksBlocking | None = None
        for key, chosen in _choices(options):
            with located_at(key):
                found = SOURCES.find_class(chosen.name, base_dir)
            if issubclass(found, MixtureSource):
                raise ConfigError(f"`{key}` must not be a mixture; list its sources as further entries", key=key)

    def use_endpoints(self, endpoints: AsksBlocking) -> None:
        self._endpoints = endpoints

    def pools(self) -> dict[Split, TaskPool]:
        """Return the pool of each split. Raise ConfigError that names the entry, or that no task of it is used."""
        parts: dict[Split, list[MixturePart]] = {split: [] for split in Split}
        for name, entry in self._entries.items():
            key = f"data.source.options.sources.{name}"
            with located_at(f"{key}.source"):
                pools = open_pools(entry.source, self._base_dir, self._endpoints, key=f"{key}.source")
            if not any(len(pools[split]) for split in entry.splits):
                raise ConfigError(
                    f"`{key}`: the source has no task in the splits {', '.join(entry.splits)}; "
                    "change `splits`, or remove the entry",
                    key=key,
                )
            if any(len(pools[split]) and pools[split].label(0, SOURCE_LABEL) for split in entry.splits):
                raise ConfigError(
                    f"`{key}.source`: its tasks must not have the label `{SOURCE_LABEL}`, which is the name of the "
                    "entry; give that label another name",
                    key=f"{key}.source",
                )
            for split in entry.splits:
                part = MixturePart(source=name, pool=pools[split], agent=entry.agent, scorers=entry.scorers)
                parts[split].append(part)
        return {split: MixturePool(of_split) for split, of_split in parts.items()}

    def tasks(self) -> Iterator[PoolTask]:
        """Yield the tasks of `pools`."""
        for pool in self.pools().values():
            yield from (pool.task(position) for position in range(len(pool)))


def single_sources(chosen: Extension, key: str = "data.source") -> Iterator[tuple[str, Extension]]:
    """Yield key and choice of each source that is not a mixture: `chosen` itself, or the entries of a mixture. Raise
    ConfigError for wrong options of a mixture."""
    if chosen.name not in (MIXTURE, f"{MixtureSource.__module__}:{MixtureSource.__name__}"):
        yield key, chosen
        return
    options = SOURCES.options(chosen)
    assert isinstance(options, MixtureOptions)
    yield from _choices(options, key)


def _choices(options: MixtureOptions, key: str = "data.source") -> Iterator[tuple[str, Extension]]:
    for name, entry in options.sources.items():
        yield f"{key}.options.sources.{name}.source", entry.source
