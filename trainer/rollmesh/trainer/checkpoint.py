"""Checkpoints: the commit point of training.

A checkpoint is one folder `<root>/update-00000012.0` (update, incarnation):

    config.json, generation_config.json, model.safetensors, tokenizer files    plain transformers format
    optimizer.pt          optimizer state
    plugins.pt            memory and modules of the estimator, the loss and the update rule, moving average of the reference
    trained.jsonl         samples that these weights were trained on (`trained_log`)
    data_snapshot.bin     state of the data service, opaque here
    rollmesh.json         position and SHA-256 of every other file

A save is atomic: all files are written and synced in a hidden temporary folder, which is then renamed. A leftover temporary folder is
ignored, and the next save removes it. Files are compared with their hashes before they are loaded (`checkpoint_files`).

There is no random-generator state, because `BatchTrainer` derives all randomness from (seed, update), and the schedule from the update.
Other files in `<root>` are never changed.
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
from rollmesh.trainer.update import BatchTrainer

OPTIMIZER_NAME = "optimizer.pt"
PLUGINS_NAME = "plugins.pt"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    path: Path
    meta: CheckpointMeta
    passed_by: tuple[str, ...] = ()
    """Errors of newer checkpoints; see `checkpoint_files`."""

    @property
    def trained(self) -> Path:
        return self.path / TRAINED_NAME

    def data_snapshot(self) -> bytes:
        return (self.path / SNAPSHOT_NAME).read_bytes()

    def trained_log(self) -> TrainedLog:
        """Return a log that continues from this checkpoint."""
        return TrainedLog(self.trained, update=self.meta.update, digest=self.meta.digest)

    def restore(self, trainer: BatchTrainer) -> tuple[str, ...]:
        """Load weights, optimizer state and step into a trainer of the same model and optimizer.

        Only the moments of the optimizer are loaded; its settings stay the trainer's. Returns the settings that differ, e.g.
        "betas (0.9, 0.95) -> (0.9, 0.99)", without the learning rate, which is a function of the update.

        Raises CheckpointError if they do not fit, or if the trainer's seed differs, because it would then draw other minibatches.
        """
        if trainer.seed != self.meta.seed:
            raise CheckpointError(f"{self.path} was trained with seed {self.meta.seed}, not {trainer.seed}")
        try:
            load_weights(trainer.model, self.path / WEIGHTS_NAME)
            if (
                plugins := self.path / PLUGINS_NAME
            ).exists():  # before the optimizer, whose error would not name the part
                trainer.load_memory(torch.load(plugins, map_location=trainer.model.device, weights_only=True))
            state = torch.load(self.path / OPTIMIZER_NAME, map_location=trainer.model.device, weights_only=True)
            changed = _load_moments(trainer.optimizer, state)
        except (ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"{self.path} does not fit the configured model, optimizer or recipe: {error}"
            ) from error
        trainer.step = self.meta.update
        return changed


def save_checkpoint(
    root: Path,
    trainer: BatchTrainer,
    tokenizer: PreTrainedTokenizerBase | None,
    log: TrainedLog,
    position: CheckpointPosition,
    *,
    data_snapshot: bytes = b"",
    keep_last: int = 3,
) -> Checkpoint:
    """Write a checkpoint durably, then remove all except the newest `keep_last`. The log continues from the new file.

    Raises ValueError if position, trainer and log have different updates, or if the folder exists.
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
    """Return the newest intact checkpoint; None without a checkpoint. Raises CheckpointError if no checkpoint is intact."""
    found = newest_whole(root)
    return None if found is None else Checkpoint(found.path, found.meta, found.passed_by)


def _load_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> tuple[str, ...]:
    """Load an optimizer's state without its settings, which `load_state_dict` would overwrite. Return the settings that differ."""
    present = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    changed: dict[str, None] = {}
    for group, settings in zip(optimizer.param_groups, present, strict=True):
        for name, value in settings.items():
            if name != "lr" and group.get(name) != value:
                changed[f"{name} {group.get(name)} -> {value}"] = None
        group.update(settings)
    return tuple(changed)


def _check_agreement(trainer: BatchTrainer, log: TrainedLog, position: CheckpointPosition, keep_last: int) -> None:
    if keep_last < 1:
        raise ValueError(f"keep_last must be >= 1, got {keep_last}")
    if not trainer.step == log.update == position.update:
        raise ValueError(f"trainer at {trainer.step}, list at {log.update}, position at {position.update}")
    if position.digest != log.digest:
        raise ValueError(
            f"position.digest must equal the digest {log.digest} of update {position.update} in the list, got {position.digest}"
        )
    if position.seed != trainer.seed:
        raise ValueError(f"position.seed must equal the trainer's seed {trainer.seed}, got {position.seed}")


def _write_files(
    folder: Path,
    trainer: BatchTrainer,
    tokenizer: PreTrainedTokenizerBase | None,
    log: TrainedLog,
    data_snapshot: bytes,
) -> None:
    write_model_folder(trainer.model, tokenizer, folder)
    torch.save(trainer.optimizer.state_dict(), folder / OPTIMIZER_NAME)
    torch.save(trainer.memory(), folder / PLUGINS_NAME)
    log.write_to(folder / TRAINED_NAME)
    (folder / SNAPSHOT_NAME).write_bytes(data_snapshot)


def _remove_leftovers(root: Path) -> None:
    for path in root.iterdir():
        if path.name.startswith(TEMPORARY):
            shutil.rmtree(path)
