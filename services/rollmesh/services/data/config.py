"""Configuration of the data service: a source, a selector, and how the ledger is followed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

from msgspec import Meta

from rollmesh.services.data.engine import DataEngine
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.selector import SELECTORS, Selector
from rollmesh.services.data.snapshots import SnapshotFolder
from rollmesh.services.data.source import SOURCES, TaskSource
from rollmesh.services.data.task import PoolTask, Split, TaskPool
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import ConfigError, MeshError
from rollmesh.shared.registry import Extension
from rollmesh.shared.settings import LIVE, NonNegativeInt, PositiveInt, Settings
from rollmesh.shared.user_code import explain, user_traceback


class DataConfig(Settings):
    """Settings of the data service."""

    source: Extension = Extension("calc")
    """Source of the tasks: `jsonl`, `calc`, `code`, `sql`, or your own."""
    selector: Extension = Extension("uniform")
    """Selector of the next training task: `uniform`, `thompson`, or your own."""
    seed: NonNegativeInt = 0
    """Seed of the draws; not of the tasks."""
    epochs_max: Annotated[NonNegativeInt, LIVE] = 0
    """The training pool is used up after this many times its size in draws; 0 = never."""
    success_reward: str = ""
    """Reward that selectors learn from, read as a success rate in [0, 1]; empty = the run's `success_reward`."""
    catch_up_s_max: Annotated[float, Meta(ge=0, le=60), LIVE] = 5.0
    """Longest time a call waits for the ledger position it asks for before it is told to retry, seconds."""
    runs_max: Annotated[PositiveInt, LIVE] = 16
    """Most runs whose ledgers are followed at once."""

    snapshot_records: Annotated[NonNegativeInt, LIVE] = 20_000
    """Ledger records between snapshots, which bound the fold after a restart; 0 leaves one only at an orderly end."""


def build_pools(config: DataConfig, base_dir: str | Path | None = None) -> dict[Split, TaskPool]:
    """Return the pools of all splits. Relative files are relative to `base_dir`.

    Raise ConfigError or RecordError if the source is unusable or has no training task.
    """
    name = config.source.name
    source: TaskSource = SOURCES.make(config.source, base_dir, base_dir=base_dir)
    tasks: dict[Split, list[PoolTask]] = {split: [] for split in Split}
    try:
        for task in source.tasks():
            tasks[Split(task.split)].append(task)
        pools = {split: MemoryPool(found) for split, found in tasks.items()}
    except MeshError:
        raise
    except Exception as err:  # user code may raise anything; the name that led to it must be reported
        raise ConfigError(
            f"`data.source`: source `{name}` failed: {explain(err)}\n{user_traceback(err)}", key="data.source"
        ) from err
    if not pools[Split.TRAIN]:
        raise ConfigError("`data.source`: no task is in the train split; give it more tasks or smaller held-out shares")
    return dict(pools)


def build_selector(config: DataConfig, pool: TaskPool, base_dir: str | Path | None = None) -> Selector:
    """A fresh selector over `pool`. A user's relative file is looked up in `base_dir`. ConfigError."""
    return cast(Selector, SELECTORS.make(config.selector, base_dir, pool=pool, seed=config.seed))


def build_engine(
    config: DataConfig,
    *,
    bus: Bus,
    clock: Clock,
    base_dir: str | Path | None = None,
    snapshots: SnapshotFolder | None = None,
) -> DataEngine:
    """Everything the service runs on; without `snapshots` every start folds whole ledgers. ConfigError, or RecordError for a malformed task file."""
    pools = build_pools(config, base_dir)
    build_selector(config, pools[Split.TRAIN], base_dir)  # a wrong selector is told now, not at the first draw
    return DataEngine(
        pools=pools,
        new_selector=lambda pool: build_selector(config, pool, base_dir),
        bus=bus,
        clock=clock,
        success_reward=config.success_reward,
        epochs_max=config.epochs_max,
        catch_up_s_max=config.catch_up_s_max,
        runs_max=config.runs_max,
        snapshots=snapshots,
        snapshot_records=config.snapshot_records,
    )
