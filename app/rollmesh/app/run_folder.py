"""The folder of a run: its layout. A run never overwrites another one.

runs/<name>-<time>/
  config.yaml     the resolved configuration         run.json      command line, versions, folder of the user's files
  model/          the model created for the run      checkpoints/  plain transformers folders
  series.jsonl    states of the run over time        metrics.jsonl, tensorboard/   per update, by the learner
  loggers.json    ids of the run in the trackers of `run.loggers`
  summary.json  report.html  report.png              run.log       log of the services
  audit.json      the audit from before the ledger was removed
  traces/         spans, for `rollmesh trace`        metrics/      address of the metrics of each process
  nats/  coordinator/  depot/  ...                   files of the services
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from rollmesh.app.config import TrainConfig, load_train_config
from rollmesh.mesh import run_lock
from rollmesh.shared.config.loader import to_yaml
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.errors import AlreadyExists, ConfigError
from rollmesh.shared.store.private_files import private_opener
from rollmesh.shared.telemetry import LoggingConfig, set_up_logging
from rollmesh.trainer.checkpoint_files import list_checkpoints

PACKAGES = ("rollmesh", "torch", "transformers", "grpcio", "protobuf", "nats-py", "msgspec", "numpy")
_SAME_SECOND_MAX = 100
RESTORING = "restoring.json"
"""File in the folder of a `rollmesh restore` that is not complete."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """run.json: command, versions and platform of a run."""

    command: list[str]
    base_dir: str
    """Folder of the files that the configuration names."""
    started_at: str
    """ISO 8601, local time with offset."""
    python: str
    platform: str
    packages: dict[str, str]
    is_mesh: bool = False
    """Whether `rollmesh up` created the folder: a mesh for external trainers, without a run of its configuration."""


class RunExistsHere(AlreadyExists):
    """The folder is in use; the message says how to proceed."""

    reason = "RUN_FOLDER_TAKEN"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths in the folder of one run."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def origin(self) -> Path:
        return self.root / "run.json"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def series(self) -> Path:
        return self.root / "series.jsonl"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def loggers(self) -> Path:
        """The state of `run_loggers`."""
        return self.root / "loggers.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def picture(self) -> Path:
        return self.root / "report.png"

    @property
    def log(self) -> Path:
        return self.root / "run.log"

    @property
    def audit(self) -> Path:
        return self.root / "audit.json"

    @property
    def was_started(self) -> bool:
        """Whether services have used this folder."""
        return (self.root / "addresses.json").exists()

    @property
    def ledger_was_removed(self) -> bool:
        """Whether `rollmesh clean --for-good` removed the streams of the embedded server."""
        return self.audit.exists() and not (self.root / "nats").exists()

    def read_origin(self) -> Origin:
        """Return the content of run.json. Raises ConfigError if this is not a run's folder."""
        try:
            return msgspec.json.decode(self.origin.read_bytes(), type=Origin)
        except (OSError, *UNDECODABLE) as err:
            raise ConfigError(
                f"{self.root}: not the folder of a run: {self.origin.name} cannot be read ({err}); "
                "name a folder that `rollmesh train` or `rollmesh demo` created",
                path=self.root,
            ) from err

    def write(self, config: TrainConfig, origin: Origin) -> None:
        self.config.write_text(to_yaml(config), encoding="utf-8")
        self.origin.write_bytes(msgspec.json.format(msgspec.json.encode(origin), indent=2) + b"\n")

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint with the highest incarnation, then the highest update. It is not verified."""
        found = list_checkpoints(self.checkpoints)
        return found[-1] if found else None


def new_folder(config: TrainConfig, origin: Origin, out: Path | None = None) -> RunFolder:
    """Create a folder with configuration and origin: `out`, or runs/<name>-<time>. Raises RunExistsHere if `out` is not
    empty."""
    folder = RunFolder(claim_folder(config.run.name, out))
    folder.write(config, origin)
    return folder


def open_folder(root: Path, overrides: list[str]) -> tuple[RunFolder, TrainConfig, Path]:
    """Return folder and configuration (with `overrides`) of a run, and the base folder of the user's files. Write
    nothing.

    Raises ConfigError if it is not a run's folder, its configuration is invalid, or a restore into it was interrupted.
    """
    folder = RunFolder(root.resolve())
    if (folder.root / RESTORING).exists():
        raise ConfigError(
            f"{folder.root}: a restore into this folder is not complete; repeat `rollmesh restore FILE --out {root}` "
            "with the same file",
            path=folder.root,
        )
    origin = folder.read_origin()
    return folder, load_train_config(folder.config, overrides), Path(origin.base_dir)


@contextmanager
def logging_to(path: Path, config: LoggingConfig | None = None) -> Iterator[None]:
    """Append the log lines of this process to a file; without handlers afterwards."""
    with open(path, "a", encoding="utf-8", opener=private_opener) as log:
        set_up_logging(config, stream=log)
        try:
            yield
        finally:
            logging.shutdown()
            logging.getLogger().handlers.clear()


def shown(path: Path) -> str:
    """Return the path relative to the working directory if it is below it, else the whole path."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def run_config(folder: RunFolder, config: TrainConfig) -> TrainConfig:
    """Return the configuration for the services: with the folder of the model if it was created for the run."""
    if config.made_model is None:
        return config
    return msgspec.structs.replace(config, made_model=None, model=str(folder.model))


def origin_now(command: list[str], base_dir: Path, *, is_mesh: bool = False) -> Origin:
    """Return the origin of a run, or of a mesh without a run, that starts now."""
    return Origin(
        command=command,
        base_dir=str(base_dir.resolve()),
        started_at=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        python=sys.version.split()[0],
        platform=f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores",
        packages={name: version for name in PACKAGES if (version := _version(name))},
        is_mesh=is_mesh,
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def claim_folder(name: str, out: Path | None) -> Path:
    """Create an empty folder and return its absolute path: `out`, or runs/<name>-<time>. Raises RunExistsHere,
    ConfigError."""
    return _claim(out) if out is not None else _claim_dated(name)


def _claim(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
        # A command that failed early leaves its lock file.
        taken = any(entry.name != run_lock.FILE for entry in out.iterdir())
    except OSError as err:
        raise ConfigError(
            f"{out}: cannot be the folder of a run: {err.strerror}; choose another --out", path=out
        ) from err
    if taken:
        what = "is not empty;"
        if (folder := RunFolder(out)).origin.exists():
            what = f"holds a run; resume it with `rollmesh train {out}`, or"
            if folder.read_origin().is_mesh:
                what = f"holds a mesh; restart it with `rollmesh up {out}`, or"
        raise RunExistsHere(f"{out} {what} choose another --out", path=out)
    return out.resolve()


def _claim_dated(name: str) -> Path:
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, _SAME_SECOND_MAX):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as err:
            raise ConfigError(
                f"{path}: cannot be created: {err.strerror}; name a folder with --out", path=path
            ) from err
        return path.resolve()
    raise RunExistsHere(f"runs/{stem}: {_SAME_SECOND_MAX} runs started in this second; name a folder with --out")
