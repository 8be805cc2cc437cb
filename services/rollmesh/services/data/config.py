"""Settings of the data service, and construction of its engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

from msgspec import Meta

from rollmesh.services.data.engine import DataEngine
from rollmesh.services.data.selector import SELECTORS, Selector
from rollmesh.services.data.snapshots import SnapshotFolder
from rollmesh.services.data.source import SUBMITTED, open_pools
from rollmesh.services.data.task import Split, TaskPool
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.clock import Clock
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.config.settings import LIVE, NonNegativeInt, PositiveInt, Settings
from rollmesh.shared.endpoints.blocking import BlockingEndpoints
from rollmesh.shared.errors import ConfigError


class DataConfig(Settings):
    """Settings of the data service."""

    source: Extension = Extension("calc")
    """Source of the tasks: `jsonl`, `files`, `calc`, `code`, `sql`, `mixture` for several of them, or your own.
    `submitted` has none, because clients submit them (`run.submitted_tasks`)."""
    selector: Extension = Extension("uniform")
    """Selector of the next training task: `uniform`, `thompson`, `sec`, `dump`, `historical_variance`, `changepoint`,
    `mixture`, or your own."""
    seed: NonNegativeInt = 0
    """Seed of the draws. The tasks do not depend on it."""
    epochs_max: Annotated[NonNegativeInt, LIVE] = 0
    """Number of epochs of the training pool, after which training draws end. 0 means no limit. An epoch is as many
    draws as the pool has tasks, so with a mixture a source may end before or after its own epoch."""
    success_reward: str = ""
    """Reward that selectors read as a success rate in [0, 1]. Default: the `success_reward` of the run."""
    catch_up_s_max: Annotated[float, Meta(ge=0, le=60), LIVE] = 5.0
    """Timeout of a call that waits for a ledger position, in seconds. The caller retries after it."""
    runs_max: Annotated[PositiveInt, LIVE] = 16
    """Maximum number of runs whose ledgers are followed."""

    snapshot_records: Annotated[NonNegativeInt, LIVE] = 20_000
    """Ledger records between snapshots, which bound the fold after a restart. 0 stores a snapshot only on a clean
    exit."""


def build_pools(
    config: DataConfig, base_dir: str | Path | None = None, endpoints: BlockingEndpoints | None = None
) -> dict[Split, TaskPool]:
    """Return the pools of all splits. Relative files are relative to `base_dir`. `endpoints` are closed afterwards.

    Raise ConfigError or RecordError if the source is unusable or has no training task.
    """
    with endpoints or BlockingEndpoints({}) as client:
        pools = open_pools(config.source, base_dir, client, key="data.source")
    if not len(pools[Split.TRAIN]) and config.source.name != SUBMITTED:
        raise ConfigError("`data.source`: no task is in the train split; give it more tasks or smaller held-out shares")
    return pools


def build_selector(config: DataConfig, pool: TaskPool, base_dir: str | Path | None = None) -> Selector:
    """Return a new selector over `pool`. Relative files are relative to `base_dir`. Raise ConfigError."""
    if not len(pool) and config.selector.name != "uniform":
        raise ConfigError(
            f"`data.selector` must be uniform, got {config.selector.name!r}: submitted tasks are drawn in the order of "
            "their submission",
            key="data.selector",
        )
    return cast(Selector, SELECTORS.make(config.selector, base_dir, pool=pool, seed=config.seed))


def build_engine(
    config: DataConfig,
    *,
    bus: Bus,
    clock: Clock,
    base_dir: str | Path | None = None,
    snapshots: SnapshotFolder | None = None,
    endpoints: BlockingEndpoints | None = None,
) -> DataEngine:
    """Return the engine of the service. Without `snapshots`, every start folds whole ledgers.

    Raise ConfigError, or RecordError for a malformed task file.
    """
    pools = build_pools(config, base_dir, endpoints)
    build_selector(config, pools[Split.TRAIN], base_dir)  # reject a wrong selector now, not at the first draw
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
