"""Log a run to MLflow. Requires the package mlflow, or mlflow-skinny for a tracking server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from rollmesh.app.loggers.run_loggers import LoggedRun, RunLogger, flat
from rollmesh.shared.config.settings import NonEmptyStr, Settings
from rollmesh.shared.errors import ConfigError

_PARAMS_MAX = 100
"""Maximum parameters per request, by the limits of the REST API of MLflow."""
_PARAM_CHARS_MAX = 500
_METRICS_MAX = 1000
_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)
"""Characters that names in MLflow must not have."""


class MlflowOptions(Settings):
    """Options of the logger `mlflow`. Credentials come from the environment variables of MLflow."""

    uri: NonEmptyStr
    """Tracking server or database, e.g. http://127.0.0.1:5000 or sqlite:////data/mlflow.db."""
    experiment: NonEmptyStr = "rollmesh"
    """Experiment of the run. It is created if it does not exist."""


class MlflowLogger(RunLogger):
    """A run in MLflow, whose step is the update. A resumed run continues it."""

    Options: ClassVar[type[Settings]] = MlflowOptions

    def __init__(self, *, run: LoggedRun, options: MlflowOptions) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
            from mlflow.exceptions import MlflowException
        except ModuleNotFoundError as err:
            raise ConfigError(
                "`run.loggers`: mlflow requires the package mlflow: pip install mlflow", key="run.loggers"
            ) from err
        self._metric = Metric
        try:
            self._client = MlflowClient(options.uri)
            self.tracker_id: str = run.tracker_id
            if not self.tracker_id:
                known = self._client.get_experiment_by_name(options.experiment)
                experiment = known.experiment_id if known else self._client.create_experiment(options.experiment)
                self.tracker_id = self._client.create_run(experiment, run_name=run.folder.name).info.run_id
                params = [
                    Param(_FORBIDDEN.sub("_", name), value[:_PARAM_CHARS_MAX])
                    for name, value in flat(run.config).items()
                ]
                for start in range(0, len(params), _PARAMS_MAX):
                    self._client.log_batch(self.tracker_id, params=params[start : start + _PARAMS_MAX])
            else:
                self._client.set_terminated(self.tracker_id, "RUNNING")
        except MlflowException as err:
            raise ConfigError(
                f"`run.loggers`: MLflow at {options.uri} cannot be used: {err}; check the option uri and that the "
                "server runs",
                key="run.loggers",
            ) from err

    def add(self, update: int, time_unix_s: float, values: Mapping[str, float]) -> None:
        at_ms = int(time_unix_s * 1000)
        metrics = [self._metric(_FORBIDDEN.sub("_", name), value, at_ms, update) for name, value in values.items()]
        for start in range(0, len(metrics), _METRICS_MAX):
            self._client.log_batch(self.tracker_id, metrics=metrics[start : start + _METRICS_MAX])

    def close(self, *, finished: bool) -> None:
        self._client.set_terminated(self.tracker_id, "FINISHED" if finished else "KILLED")
