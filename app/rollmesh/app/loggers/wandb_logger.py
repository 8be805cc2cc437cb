"""Log a run to Weights & Biases. Requires the package wandb."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from rollmesh.app.loggers.run_loggers import LoggedRun, RunLogger, check_installed
from rollmesh.shared.config.settings import NonEmptyStr, PositiveFloat, Settings
from rollmesh.shared.errors import ConfigError


class WandbOptions(Settings):
    """Options of the logger `wandb`. The key of the service comes from `wandb login` or WANDB_API_KEY."""

    project: NonEmptyStr = "rollmesh"
    """Project of the run."""
    entity: str = ""
    """User or team that owns the project. Empty: the default of the key."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes into the run folder; `wandb sync` uploads it later."""
    connect_s: PositiveFloat = 60.0
    """Maximum time to reach the service at the start."""


class WandbLogger(RunLogger):
    """A run in Weights & Biases, whose x-axis is the update. A resumed run continues it."""

    Options: ClassVar[type[Settings]] = WandbOptions

    def __init__(self, *, run: LoggedRun, options: WandbOptions) -> None:
        check_installed("wandb")
        import wandb

        try:
            self._run = wandb.init(
                project=options.project,
                entity=options.entity or None,
                name=run.folder.name,
                id=run.tracker_id or None,
                resume="allow",
                tags=list(options.tags) or None,
                mode=options.mode,
                dir=str(run.folder),
                config=dict(run.config),
                settings=wandb.Settings(console="off", silent=True, init_timeout=options.connect_s),
            )
        except (wandb.Error, OSError) as err:
            raise ConfigError(
                f"`run.loggers`: Weights & Biases cannot be used: {err}; log in with `wandb login`, or set the option "
                "mode: offline",
                key="run.loggers",
            ) from err
        self.tracker_id: str = self._run.id
        self._end_service = wandb.teardown  # `finish` alone returns before everything is written
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def add(self, update: int, time_unix_s: float, values: Mapping[str, float]) -> None:
        self._run.log({"update": update, **values})

    def close(self, *, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)
        self._end_service()
