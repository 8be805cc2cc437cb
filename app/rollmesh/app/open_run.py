"""Open the folder of a new or a resumed run, and hold its lock.

Everything is checked before a service starts: a change of a fixed setting is rejected, a damaged checkpoint is skipped
and reported. Collaborators: `mesh.changes` (the table of settings), `trainer.checkpoint_files`, `run_folder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollmesh.app.checks.config_checks import check, load_checked
from rollmesh.app.checks.task_survey import TaskSurvey
from rollmesh.app.config import TrainConfig, load_train_config
from rollmesh.app.run_folder import RunFolder, new_folder, open_folder, origin_now, run_config
from rollmesh.mesh.changes import check_changes, describe, diff, recorded, settings_of
from rollmesh.mesh.run_lock import owned
from rollmesh.services.coordinator.core.facts import ConfigChange
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.checkpoint_files import CheckpointError, newest_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that is about to start or to resume."""

    folder: RunFolder
    config: TrainConfig
    base_dir: Path
    """Folder of the files that the configuration names."""
    tasks: TaskSurvey
    notes: tuple[str, ...]
    """Changed settings and damaged checkpoints, a line each."""


@contextmanager
def open_run(path: Path, overrides: Sequence[str], *, command: list[str], out: Path | None) -> Iterator[OpenedRun]:
    """Create a run from a configuration file, or resume the run in a folder, with the lock of its folder. Raises
    MeshError."""
    if path.is_dir():
        if out is not None:
            raise ConfigError(
                f"--out {out} cannot be used with a run's folder, because a resumed run stays in it; remove --out"
            )
        if RunFolder(path).read_origin().is_mesh:
            raise ConfigError(f"{path} holds a mesh without a run; restart it with `rollmesh up {path}`", path=path)
        with owned(path.resolve()):  # before anything is read or written: another process may be running the run
            yield open_resumed(path, list(overrides))
        return
    (config, tasks), base_dir = load_checked(path, overrides), path.parent.resolve()
    # All checks come before the folder is created, so a mistake leaves no folder behind.
    folder = new_folder(config, origin_now(command, base_dir), out)
    with owned(folder.root):
        yield OpenedRun(folder=folder, config=config, base_dir=base_dir, tasks=tasks, notes=())


def open_resumed(root: Path, overrides: list[str]) -> OpenedRun:
    """Open the run in a folder with its configuration and `overrides`, and write the configuration back.

    Raises ConfigError if it is not a run's folder, its configuration is unusable or no checkpoint is whole;
    ChangeRefused.
    """
    folder, config, base_dir = open_folder(root, overrides)
    if folder.ledger_was_removed:
        raise ConfigError(
            f"{folder.root}: the ledger of this run was removed by `rollmesh clean --for-good`, so it cannot be "
            f"resumed; start a new run from a checkpoint in {folder.checkpoints} (model=CHECKPOINT)",
            path=folder.root,
        )
    changes = _changes(folder, load_train_config(folder.config), config)
    check_changes(changes)
    tasks = check(config, base_dir)
    damage = _damage(folder)
    if overrides:
        folder.write(config, folder.read_origin())
    changed = (f"changed: {change.key} {describe(change)}" for change in changes)
    return OpenedRun(folder=folder, config=config, base_dir=base_dir, tasks=tasks, notes=(*changed, *damage))


def open_stopped_mesh(
    root: Path, overrides: list[str], *, out: Path | None
) -> tuple[RunFolder, TrainConfig, Path, TaskSurvey]:
    """Open the folder of a mesh that `rollmesh up` created, with `overrides`, and write the configuration back.

    Raises ConfigError if it is not such a folder or its configuration is unusable; ChangeRefused, RunFolderBusy.
    """
    if out is not None:
        raise ConfigError(
            f"--out {out} cannot be used with a mesh's folder, because the mesh stays in it; remove --out"
        )
    folder, config, base_dir = open_folder(root, overrides)
    if not folder.read_origin().is_mesh:
        raise ConfigError(f"{root} holds a run; resume it with `rollmesh train {root}`", path=root)
    with owned(folder.root):
        before = load_train_config(folder.config)
        check_changes(diff(settings_of(before, folder.root), settings_of(config, folder.root)))
        tasks = check(config, base_dir, learner=False)
        if overrides:
            folder.write(config, folder.read_origin())
    return folder, config, base_dir, tasks


def _changes(folder: RunFolder, before: TrainConfig, config: TrainConfig) -> tuple[ConfigChange, ...]:
    """Compare with the settings in the ledger; before CreateRun every change is allowed. Only the folder stores
    `made_model`."""
    known = recorded(folder.root)
    if known is None:
        return ()
    made = (
        {key: value for key, value in settings_of(one, folder.root).items() if key.startswith("made_model")}
        for one in (before, config)
    )
    return (*diff(known, settings_of(run_config(folder, config), folder.root)), *diff(*made))


def _damage(folder: RunFolder) -> tuple[str, ...]:
    try:
        found = newest_whole(folder.checkpoints)
    except CheckpointError as err:
        raise ConfigError(str(err), path=folder.checkpoints) from err
    return tuple(f"warning: {damage}" for damage in found.passed_by) if found is not None else ()
