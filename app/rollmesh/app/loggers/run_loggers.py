"""Send the curves of a run to experiment trackers: Weights & Biases, MLflow, or a class of the user.

`rollmesh train` reads the metrics of the learner from `metrics.jsonl` and the evaluations from the watcher, and gives
both to every logger of `run.loggers`, with the update as their step. Loggers may block on a network, so they run in one
thread behind a bounded queue. A logger that fails is reported once and gets no further entries; it never ends or delays
training.

`loggers.json` in the run folder has the ids of the runs in the trackers, so that a resumed run continues them, and the
position in `metrics.jsonl` up to which entries were handed over. After a crash, entries since the last regular end are
sent again.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import queue
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.app.views.series import Eval
from rollmesh.services.learner.metrics_log import MetricsLine
from rollmesh.shared.config.plugin import Plugin, required
from rollmesh.shared.config.registry import Extension, Registry
from rollmesh.shared.config.user_code import explain
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.store.whole_files import write_whole

_log = logging.getLogger(__name__)
QUEUE_MAX = 10_000
"""Entries that wait for a slow logger. Further ones are dropped, with a warning."""
_LOGIN = re.compile(r"//[^/\s]*@")
CLOSE_S = 60.0
"""Maximum time for the remaining entries at the end of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """Description of the run that a logger gets."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    """The effective configuration, as nested mappings, see `without_logins`."""
    tracker_id: str = ""
    """The id that `RunLogger.tracker_id` had when this run was logged before; empty for a new run."""


class RunLogger(Plugin):
    """Base of connections to a tracker. Constructed as `cls(run=LoggedRun, options=...)`, without `options` if the
    class has no `Options`; the constructor raises ConfigError if it cannot work.

    All calls come from one thread, and may block.
    """

    tracker_id: str = ""
    """Id by which a later instance continues the same run in the tracker; may be empty."""

    @required
    def add(self, update: int, time_unix_s: float, values: Mapping[str, float]) -> None:
        """Log finite values by name, e.g. `kl/behavior`, `seconds/train` or `heldout_success`. After a roll-back,
        updates repeat."""

    @required
    def close(self, *, finished: bool) -> None:
        """Send what is pending and end. `finished`: the run needs no further updates; otherwise it can be resumed."""


LOGGERS = Registry(
    "logger",
    {
        "wandb": "rollmesh.app.loggers.wandb_logger:WandbLogger",
        "mlflow": "rollmesh.app.loggers.mlflow_logger:MlflowLogger",
    },
    RunLogger,
)


def check_installed(name: str) -> None:
    """Raise ConfigError if the package of a built-in logger, which has its name, is not installed."""
    if name in LOGGERS.names and name not in sys.modules and importlib.util.find_spec(name) is None:
        raise ConfigError(f"`run.loggers`: {name} requires the package {name}: pip install {name}", key="run.loggers")


_Entry = tuple[int, float, dict[str, float]]
"""Update, time, values."""


class _State(msgspec.Struct, kw_only=True):
    """loggers.json."""

    position: int = 0
    tracker_ids: dict[str, str] = {}


class RunLoggers:
    """The loggers of one run, open until `close`. `read` and `add_eval` never wait for a tracker."""

    def __init__(
        self, chosen: Sequence[Extension], run: LoggedRun, *, metrics: Path, state: Path, base_dir: Path
    ) -> None:
        """Connect to all trackers, which may take long. `metrics` is metrics.jsonl, `state` loggers.json. Raises
        ConfigError."""
        self._metrics, self._state_file = metrics, state
        self._state = msgspec.json.decode(state.read_bytes(), type=_State) if state.is_file() else _State()
        self._loggers: dict[str, RunLogger] = {}
        for one in chosen:
            this = replace(run, tracker_id=self._state.tracker_ids.get(one.short_name, ""))
            self._loggers[one.short_name] = LOGGERS.make(one, base_dir, run=this)
        self._state.tracker_ids |= {name: logger.tracker_id for name, logger in self._loggers.items()}
        self._save()
        self._entries: queue.Queue[_Entry | None] = queue.Queue(QUEUE_MAX)
        self._num_dropped = 0
        self._finished = False
        self._thread = threading.Thread(target=self._work, name="run-loggers", daemon=True)
        self._thread.start()

    def read(self) -> None:
        """Hand over the complete lines of metrics.jsonl since the last call."""
        if not self._metrics.is_file():
            return
        with self._metrics.open("rb") as file:
            file.seek(self._state.position)
            found = file.read().rpartition(b"\n")[0]
        for raw in found.splitlines():
            try:
                line = msgspec.json.decode(raw, type=MetricsLine)
            except UNDECODABLE as err:
                _log.warning("a line of metrics.jsonl is malformed, and the loggers do not get it: cause=%s", err)
                continue
            known = {name: value for name, value in line.metrics.items() if value is not None}
            seconds = {f"seconds/{name}": value for name, value in line.seconds.items()}
            self._put((line.update, line.time_unix_s, known | seconds))
        self._state.position += len(found) + 1 if found else 0

    def add_eval(self, result: Eval, time_unix_s: float) -> None:
        """Hand over an evaluation: `heldout_success`, and one value per label."""
        self._put((result.step, time_unix_s, heldout_values(result)))

    def close(self, *, finished: bool) -> None:
        """Hand over the rest, and wait at most `CLOSE_S` until the trackers have it. `finished`: see
        `RunLogger.close`."""
        self.read()
        self._save()
        self._finished = finished
        with suppress(queue.Full):
            self._entries.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            _log.warning("the loggers did not finish within %.0f s: loggers=%s", CLOSE_S, ", ".join(self._loggers))

    def _put(self, entry: _Entry) -> None:
        try:
            self._entries.put_nowait(entry)
        except queue.Full:
            self._num_dropped += 1
            if self._num_dropped == 1:
                _log.warning(
                    "a logger is too slow, so entries are dropped; metrics.jsonl has all of them: waiting=%d", QUEUE_MAX
                )

    def _work(self) -> None:
        failed: set[str] = set()
        while (entry := self._entries.get()) is not None:
            update, time_unix_s, values = entry
            finite = {name: value for name, value in values.items() if math.isfinite(value)}
            for name, logger in self._loggers.items():
                if name not in failed and not self._works(name, partial(logger.add, update, time_unix_s, finite)):
                    failed.add(name)
        for name, logger in self._loggers.items():
            self._works(name, partial(logger.close, finished=self._finished and name not in failed))

    def _works(self, name: str, call: Callable[[], None]) -> bool:
        """Make a call of a logger. Return False, with a warning, if it raises."""
        try:
            call()
        except Exception as err:  # noqa: BLE001 (the client of a tracker may raise anything, and must not end the run)
            _log.warning("a logger failed and gets no further entries: logger=%s cause=%s", name, explain(err))
            return False
        return True

    def _save(self) -> None:
        """Write the state. A crash leaves the old or the new one, because a malformed one would end the next session at
        its start."""
        write_whole(self._state_file, msgspec.json.encode(self._state) + b"\n", private=False)


def heldout_values(result: Eval) -> dict[str, float]:
    """Return the values of an evaluation by name."""
    by_label = {f"heldout_success/{label}": value for label, value in result.success_by_label.items()}
    return {"heldout_success": result.success, **by_label}


def without_logins(config: Any) -> Any:
    """Return the values of a configuration without user and password in their URLs, which the users of a tracker must
    not see."""
    if isinstance(config, Mapping):
        return {name: without_logins(value) for name, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [without_logins(value) for value in config]
    return _LOGIN.sub("//", config) if isinstance(config, str) else config


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values of a configuration by dotted name, as text."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = str(value)
    return found
