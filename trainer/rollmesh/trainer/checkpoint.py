"""Checkpoints: the commit point of training.

A checkpoint is one folder `<root>/update-00000012.0` (update, incarnation):

    config.json, generation_config.json, model.safetensors, tokenizer files    plain transformers format
    optimizer.pt          optimiser state
    trained.jsonl         what these weights were trained on (`trained_log`)
    data_snapshot.bin     the data service's state, opaque here
    rollmesh.json         position and SHA-256 of every other file

Atomic: everything is written and synced in a hidden temporary folder, which is then renamed. A leftover temporary one is ignored, and
removed by the next save. Files are verified against their hashes before anything is loaded (`checkpoint_files`).

There is no random-generator state: `Trainer` derives all randomness from (seed, update); the schedule from update.
Files of other owners in `<root>` are never touched.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rollmesh.trainer.checkpoint_files import (
    SNAPSHOT_NAME,
    TEMPORARY,
    TRAINED_NAME,
    CheckpointError,
    CheckpointMeta,
    CheckpointPosition,
    folder_name,
    list_checkpoints,
    newest_whole,
    sync,
    write_meta,
)
from rollmesh.trainer.model_files import WEIGHTS_NAME, load_weights, write_model_folder
from rollmesh.trainer.trained_log import TrainedLog
from rollmesh.trainer.update import Trainer

OPTIMIZER_NAME = "optimizer.pt"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    path: Path
    meta: CheckpointMeta
    passed_by: tuple[str, ...] = ()
    """What was wrong with newer ones; see `checkpoint_files`."""

    @property
    def trained(self) -> Path:
        return self.path / TRAINED_NAME

    def data_snapshot(self) -> bytes:
        return (self.path / SNAPSHOT_NAME).read_bytes()

    def trained_log(self) -> TrainedLog:
        """A log that goes on from this checkpoint."""
        return TrainedLog(self.trained, update=self.meta.update, digest=self.meta.digest)

    def restore(self, trainer: Trainer) -> tuple[str, ...]:
        """Put weights, optimiser state and step into a trainer built for the same model and optimiser.

        The settings of the optimiser stay the trainer's: only its moments are the checkpoint's. Returns the settings that
        differ, for people: "betas (0.9, 0.95) -> (0.9, 0.99)". The learning rate is not among them, it follows the update.

        Raises CheckpointError if they do not fit, or if the trainer's seed differs: it would train on, but otherwise.
        """
        if trainer.seed != self.meta.seed:
            raise CheckpointError(f"{self.path} was trained with seed {self.meta.seed}, not {trainer.seed}")
        try:
            load_weights(trainer.model, self.path / WEIGHTS_NAME)
            state = torch.load(self.path / OPTIMIZER_NAME, map_location=trainer.model.device, weights_only=True)
            changed = _load_moments(trainer.optimizer, state)
        except (ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(f"{self.path} does not fit the configured model or optimiser: {error}") from error
        trainer.step = self.meta.update
        return changed


def save_checkpoint(
    root: Path,
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase | None,
    log: TrainedLog,
    position: CheckpointPosition,
    *,
    data_snapshot: bytes = b"",
    keep_last: int = 3,
) -> Checkpoint:
    """Write a checkpoint durably, then remove all but the newest `keep_last`. The log goes on from the new file.

    Raises ValueError if position, trainer and log disagree on the update, or the folder exists already.
    """
    _check_agreement(trainer, log, position, keep_last)
    final = root / folder_name(position)
    if final.exists():
        raise ValueError(f"{final} exists already")
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    temporary = root / f"{TEMPORARY}{final.name}"
    temporary.mkdir()
    _write_files(temporary, trainer, tokenizer, log, data_snapshot)
    meta = write_meta(temporary, position)
    os.rename(temporary, final)
    sync(root)
    log.rebase(final / TRAINED_NAME)
    for old in list_checkpoints(root)[:-keep_last]:
        shutil.rmtree(old)
    return Checkpoint(final, meta)


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint; None if there is none. Raises CheckpointError if there are some, and none is whole."""
    found = newest_whole(root)
    return None if found is None else Checkpoint(found.path, found.meta, found.passed_by)


def _load_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> tuple[str, ...]:
    """Load an optimiser's state but for its settings, which `load_state_dict` would overwrite. Returns those that differ."""
    present = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    changed: dict[str, None] = {}
    for group, settings in zip(optimizer.param_groups, present, strict=True):
        for name, value in settings.items():
            if name != "lr" and group.get(name) != value:
                changed[f"{name} {group.get(name)} -> {value}"] = None
        group.update(settings)
    return tuple(changed)


def _check_agreement(trainer: Trainer, log: TrainedLog, position: CheckpointPosition, keep_last: int) -> None:
    if keep_last < 1:
        raise ValueError(f"keep_last = {keep_last}: must be at least 1")
    if not trainer.step == log.update == position.update:
        raise ValueError(f"trainer at {trainer.step}, list at {log.update}, position at {position.update}")
    if position.digest != log.digest:
        raise ValueError(f"digest of update {position.update}: the list says {log.digest}, not {position.digest}")
    if position.seed != trainer.seed:
        raise ValueError(f"seed = {position.seed}: the trainer's is {trainer.seed}")


def _write_files(
    folder: Path, trainer: Trainer, tokenizer: PreTrainedTokenizerBase | None, log: TrainedLog, data_snapshot: bytes
) -> None:
    write_model_folder(trainer.model, tokenizer, folder)
    torch.save(trainer.optimizer.state_dict(), folder / OPTIMIZER_NAME)
    log.write_to(folder / TRAINED_NAME)
    (folder / SNAPSHOT_NAME).write_bytes(data_snapshot)


def _remove_leftovers(root: Path) -> None:
    for path in root.iterdir():
        if path.name.startswith(TEMPORARY):
            shutil.rmtree(path)
