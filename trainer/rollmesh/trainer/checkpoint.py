"""Checkpoints: the commit point of training.

A checkpoint is one folder `<root>/update-00000012.0` (update, incarnation):

    config.json, generation_config.json, model.safetensors, tokenizer files    plain transformers format
    optimizer.pt          optimiser state
    trained.jsonl         what these weights were trained on (`trained_log`)
    data_snapshot.bin     the data service's state, opaque here
    rollmesh.json         position and SHA-256 of every other file

Atomic: everything is written and synced in a hidden temporary folder, which is then renamed. A folder under its final name is
therefore whole; a leftover temporary one is ignored, and removed by the next save. Files are verified against their
hashes before anything is loaded: a corrupt checkpoint is an error that names the file and the way out, never a silent
fallback, because going back to older weights is a decision (a roll-back with a new incarnation), not a detail.

There is no random-generator state: `Trainer` derives all randomness from (seed, update); the schedule from update.
Files of other owners in `<root>` are never touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from transformers import PreTrainedTokenizerBase

from rollmesh.shared.digest import INITIAL_DIGEST
from rollmesh.trainer.model_files import WEIGHTS_NAME, load_weights, write_model_folder
from rollmesh.trainer.trained_log import TrainedLog
from rollmesh.trainer.update import Trainer

META_NAME = "rollmesh.json"
OPTIMIZER_NAME = "optimizer.pt"
TRAINED_NAME = "trained.jsonl"
SNAPSHOT_NAME = "data_snapshot.bin"
FORMAT = 1

_FOLDER = re.compile(r"^update-(\d{8,})\.(\d+)$")
_TEMPORARY = ".tmp-checkpoint-"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and the remedy."""


class CheckpointPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run stands at a checkpoint. Everything a learner needs to attach again."""

    update: int
    """Updates in the weights; 0 is a checkpoint of the initial weights."""
    policy: str = "main"
    incarnation: int = 0
    digest: str = INITIAL_DIGEST
    """Commit digest after `update`."""
    seed: int = 0
    ledger_position: int = 0
    """Ledger sequence of the commit of `update`; 0 if unknown."""
    config_digest: str = ""
    """Digest of the resolved configuration of the run, to notice a resume under another one."""


class CheckpointMeta(CheckpointPosition, frozen=True, kw_only=True):
    """rollmesh.json."""

    format: int = FORMAT
    files: dict[str, str] = {}
    """File name -> SHA-256 hex."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    path: Path
    meta: CheckpointMeta

    @property
    def trained(self) -> Path:
        return self.path / TRAINED_NAME

    def data_snapshot(self) -> bytes:
        return (self.path / SNAPSHOT_NAME).read_bytes()

    def trained_log(self) -> TrainedLog:
        """A log that goes on from this checkpoint."""
        return TrainedLog(self.trained, update=self.meta.update, digest=self.meta.digest)

    def restore(self, trainer: Trainer) -> None:
        """Put weights, optimiser state and step into a trainer built for the same model and optimiser.

        Raises CheckpointError if they do not fit, or if the trainer's seed differs: it would train on, but otherwise.
        """
        if trainer.seed != self.meta.seed:
            raise CheckpointError(f"{self.path} was trained with seed {self.meta.seed}, not {trainer.seed}")
        try:
            load_weights(trainer.model, self.path / WEIGHTS_NAME)
            state = torch.load(self.path / OPTIMIZER_NAME, map_location=trainer.model.device, weights_only=True)
            trainer.optimizer.load_state_dict(state)
        except (ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(f"{self.path} does not fit the configured model or optimiser: {error}") from error
        trainer.step = self.meta.update


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
    final = root / f"update-{position.update:08d}.{position.incarnation}"
    if final.exists():
        raise ValueError(f"{final} exists already")
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    temporary = root / f"{_TEMPORARY}{final.name}"
    temporary.mkdir()
    _write_files(temporary, trainer, tokenizer, log, data_snapshot)
    meta = _write_meta(temporary, position)
    os.rename(temporary, final)
    _sync(root)
    log.rebase(final / TRAINED_NAME)
    for old in list_checkpoints(root)[:-keep_last]:
        shutil.rmtree(old)
    return Checkpoint(final, meta)


def list_checkpoints(root: Path) -> list[Path]:
    """Whole checkpoints, oldest first: by incarnation, then update (a roll-back's updates replace the older incarnation's)."""
    found = [(int(m[2]), int(m[1]), p) for p in _entries(root) if (m := _FOLDER.match(p.name)) and p.is_dir()]
    return [path for *_, path in sorted(found)]


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest checkpoint, verified; None if there is none. Raises CheckpointError if it is corrupt."""
    paths = list_checkpoints(root)
    if not paths:
        return None
    older = f"resume from {paths[-2].name}" if len(paths) > 1 else "start from the initial weights"
    try:
        return open_checkpoint(paths[-1])
    except CheckpointError as error:
        raise CheckpointError(f"{error}; remove {paths[-1]} to {older}") from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Verify one checkpoint folder. Raises CheckpointError naming the file that is missing, malformed or altered."""
    meta_path = path / META_NAME
    try:
        meta = msgspec.json.decode(meta_path.read_bytes(), type=CheckpointMeta)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"checkpoint file {meta_path} cannot be read: {error}") from error
    if meta.format != FORMAT:
        raise CheckpointError(f"{meta_path} has format {meta.format}; this version reads {FORMAT}")
    for name, expected in meta.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint file {file} is missing")
        if _sha256(file) != expected:
            raise CheckpointError(f"checkpoint file {file} is corrupt: its SHA-256 is not the recorded one")
    return Checkpoint(path, meta)


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


def _write_meta(folder: Path, position: CheckpointPosition) -> CheckpointMeta:
    """Hash and sync every file, then write rollmesh.json last."""
    files = {}
    for path in sorted(folder.iterdir()):
        _sync(path)
        files[path.name] = _sha256(path)
    meta = CheckpointMeta(**msgspec.structs.asdict(position), files=files)
    (folder / META_NAME).write_text(json.dumps(msgspec.to_builtins(meta), indent=2) + "\n")
    _sync(folder / META_NAME)
    _sync(folder)
    return meta


def _remove_leftovers(root: Path) -> None:
    for path in _entries(root):
        if path.name.startswith(_TEMPORARY):
            shutil.rmtree(path)


def _entries(root: Path) -> list[Path]:
    return list(root.iterdir()) if root.is_dir() else []


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """fsync a file or folder: a rename is durable only once the folder is, too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
