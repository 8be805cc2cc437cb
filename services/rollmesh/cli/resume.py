"""Going on with a run: what it is to be from now on, what differs from before, and whether its newest checkpoint is whole.

Everything is settled before a service starts: a setting that is fixed is refused, a damaged checkpoint is set aside and told.
Collaborators: `mesh.changes` (the table of settings), `trainer.checkpoint_files`, `run_folder`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollmesh.cli.check import check
from rollmesh.cli.config import TrainConfig, load_train_config
from rollmesh.cli.run_folder import RunFolder, open_folder, run_config
from rollmesh.mesh.changes import check_changes, describe, diff, recorded, settings_of
from rollmesh.services.coordinator.core.facts import ConfigChange
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.checkpoint_files import CheckpointError, newest_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A run that is to start or to continue."""

    folder: RunFolder
    config: TrainConfig
    base_dir: Path
    """Where files that the configuration names are looked up."""
    notes: tuple[str, ...]
    """What a person should know, a line each."""


def open_resumption(root: Path, overrides: list[str]) -> Resumption:
    """The run in a folder, with its configuration and `overrides`; the configuration is written back.

    Raises ConfigError if it isn't a run's folder, its configuration is unusable or no checkpoint is whole; ChangeRefused.
    """
    folder, config, base_dir = open_folder(root, overrides)
    if folder.ledger_was_removed:
        raise ConfigError(
            f"{folder.root}: the ledger of this run was removed by `rollmesh clean --for-good`, so it cannot be resumed; start a new "
            f"run from a checkpoint in {folder.checkpoints} (model=CHECKPOINT)",
            path=folder.root,
        )
    changes = _changes(folder, load_train_config(folder.config), config)
    check_changes(changes)
    check(config, base_dir)
    damage = _damage(folder)
    if overrides:
        folder.write(config, folder.read_origin())
    told = (f"changed: {change.key} {describe(change)}" for change in changes)
    return Resumption(folder=folder, config=config, base_dir=base_dir, notes=(*told, *damage))


def _changes(folder: RunFolder, before: TrainConfig, config: TrainConfig) -> tuple[ConfigChange, ...]:
    """Against what the ledger knows; all is open before the run was made there. A made model is the one thing only the folder knows."""
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
