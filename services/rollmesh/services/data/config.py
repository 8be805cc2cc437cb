"""Configuration of the data service: a source, a selector, and how the ledger is followed."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import msgspec

from rollmesh.services.data.engine import DataEngine
from rollmesh.services.data.pool import MemoryPool
from rollmesh.services.data.selector import SELECTORS, Selector
from rollmesh.services.data.snapshots import SnapshotFolder
from rollmesh.services.data.source import SOURCES, TaskSource
from rollmesh.services.data.task import Split, Task, TaskPool
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import ConfigError, MeshError
from rollmesh.shared.registry import Extension
from rollmesh.shared.user_code import explain, user_traceback


class DataConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the data service."""

    source: Extension = Extension("calc")
    """Source of the tasks: `jsonl`, `calc`, `code`, `sql`, or your own."""
    selector: Extension = Extension("uniform")
    """Selector of the next training task: `uniform`, `thompson`, or your own."""
    seed: int = 0
    """Seed of the draws; not of the tasks."""
    epochs_max: int = 0
    """The training pool is used up after this many times its size in draws; 0 = never."""
    success_reward: str = ""
    """Reward that selectors learn from, read as a success rate in [0, 1]; empty = the run's `success_reward`."""
    catch_up_s_max: float = 5.0
    """Longest time a call waits for the ledger position it asks for before it is told to retry, seconds."""
    runs_max: int = 16
    """Most runs whose ledgers are followed at once."""

    snapshot_records: int = 20_000
    """Ledger records between snapshots, which bound the fold after a restart; 0 leaves one only at an orderly end."""

    def __post_init__(self) -> None:
        if self.snapshot_records < 0:
            raise ValueError(f"snapshot_records must be >= 0, got {self.snapshot_records}")
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}")
        if self.epochs_max < 0:
            raise ValueError(f"epochs_max must be >= 0, got {self.epochs_max}")
        if not 0.0 <= self.catch_up_s_max <= 60.0:
            raise ValueError(f"catch_up_s_max must be in [0, 60], got {self.catch_up_s_max}")
        if self.runs_max < 1:
            raise ValueError(f"runs_max must be >= 1, got {self.runs_max}")


def build_pools(config: DataConfig, base_dir: str | Path | None = None) -> dict[Split, TaskPool]:
    """Return the pools of all splits. Relative files are relative to `base_dir`.

    Raise ConfigError or RecordError if the source is unusable or has no training task.
    """
    name = config.source.name
    source: TaskSource = SOURCES.make(config.source, base_dir, base_dir=base_dir)
    tasks: dict[Split, list[Task]] = {split: [] for split in Split}
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
