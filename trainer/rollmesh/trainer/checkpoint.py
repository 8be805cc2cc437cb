"""Checkpoints: the commit point of training.

A checkpoint is one folder `<root>/update-00000012.0` (update, incarnation):

    config.json, generation_config.json, model.safetensors, tokenizer files    plain transformers format
    adapter_config.json, adapter_model.safetensors, base.json, tokenizer files     instead, for low-rank adapters (`lora`)
    optimizer.pt          optimizer state of a trainer of one rank
    optimizer/            optimizer state of a trainer of several ranks (`torch.distributed.checkpoint`)
    optimizer_groups.pt   settings of its parameter groups, to report those that differ at a resume
    plugins.pt            memory and modules of the estimator, the loss and the update rule, moving average of the reference
    settings.json         settings of the recipe, to report those that differ at a resume
    trained.jsonl         samples that these weights were trained on (`trained_log`)
    data_snapshot.bin     state of the data service, opaque here
    rollmesh.json         position and SHA-256 of every other file

A save is atomic: all files are written and synced in a hidden temporary folder, which is then renamed. A leftover
temporary folder is ignored, and the next save removes it. Files are compared with their hashes before they are loaded
(`checkpoint_files`).

A checkpoint does not depend on the number of ranks: any number can resume from it. Several ranks save together. Rank 0
calls `save_checkpoint` and every other rank `save_part`, over one file system.

There is no random-generator state, because `BatchTrainer` derives all randomness from (seed, update), and the schedule
from the update. Other files in `<root>` are never changed.

`copy_checkpoint` divides a save of one rank into a copy in memory and its writing, which may run beside the next
update.
"""  # noqa: E501, W505

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map, tree_map_only
from transformers import PreTrainedTokenizerBase

from rollmesh.shared.weights.manifest import ADAPTER_CONFIG
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
from rollmesh.trainer.config import LoraSettings
from rollmesh.trainer.lora import BASE_NAME
from rollmesh.trainer.model_files import (
    WEIGHTS_NAME,
    load_weights,
    published_state,
    save_tokenizer,
    write_model_folder,
    write_weights,
)
from rollmesh.trainer.sharding import assign, whole
from rollmesh.trainer.trained_log import TrainedLog
from rollmesh.trainer.update import BatchTrainer

OPTIMIZER_NAME = "optimizer.pt"
OPTIMIZER_PARTS = "optimizer"
OPTIMIZER_GROUPS = "optimizer_groups.pt"
SETTINGS_NAME = "settings.json"
PLUGINS_NAME = "plugins.pt"


@dataclass(frozen=True, slots=True)
class _CopiedState:
    """Copies of what updates change: weights by name, state dict of the optimizer, memory of the parts."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    memory: dict[str, Any]


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

    def changed_settings(self, current: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the settings of the recipe that differ from the `current` ones, e.g. "optimizer.lr 0.001 ->
        0.0001"."""
        path = self.path / SETTINGS_NAME
        if not path.exists():  # written by an older version
            return ()
        before, after = (_flat(msgspec.json.decode(data)) for data in (path.read_bytes(), msgspec.json.encode(current)))
        absent = "absent"
        return tuple(
            f"{name} {before.get(name, absent)} -> {after.get(name, absent)}"
            for name in dict.fromkeys((*before, *after))
            if before.get(name, absent) != after.get(name, absent)
        )

    def model_folder(self, lora: LoraSettings, initial: Path | str) -> Path:
        """Return the folder whose model a trainer loads to resume: the checkpoint, or, with adapters, their base:
        `initial` if it is given.

        Raises CheckpointError if the checkpoint has adapters and the settings do not, or the reverse.
        """
        has_adapters = (self.path / ADAPTER_CONFIG).is_file()
        if has_adapters and not lora.rank:
            raise CheckpointError(
                f"{self.path} has low-rank adapters, and `learner.lora.rank` is 0; resume with the settings with which "
                "they were written, or merge them into the base and begin a new run from it"
            )
        if lora.rank and not has_adapters:
            raise CheckpointError(
                f"{self.path} has whole weights, and `learner.lora.rank` is {lora.rank}; resume with rank 0, or begin "
                "a new run with this checkpoint as its model"
            )
        if not has_adapters:
            return self.path
        return Path(initial or msgspec.json.decode((self.path / BASE_NAME).read_bytes())["model"])

    def restore(self, trainer: BatchTrainer) -> tuple[str, ...]:
        """Load weights, optimizer state and step into a trainer of the same model and optimizer.

        Only the moments of the optimizer are loaded; its settings stay the trainer's. Returns the settings that differ,
        e.g. "betas (0.9, 0.95) -> (0.9, 0.99)", without the learning rate, which is a function of the update.

        Raises CheckpointError if they do not fit, or if the trainer's seed differs, because it would then draw other
        minibatches.
        """
        if trainer.seed != self.meta.seed:
            raise CheckpointError(f"{self.path} was trained with seed {self.meta.seed}, not {trainer.seed}")
        try:
            if trainer.adapters is None:
                load_weights(trainer.model, self.path / WEIGHTS_NAME)
            else:
                trainer.adapters.load(self.path)
            if (
                plugins := self.path / PLUGINS_NAME
            ).exists():  # before the optimizer, whose error would not name the part
                trainer.load_memory(_load_memory(plugins, trainer.device))
            changed = self._restore_optimizer(trainer)
        except (ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"{self.path} does not fit the configured model, optimizer or recipe: {error}"
            ) from error
        trainer.step = self.meta.update
        return changed

    def _restore_optimizer(self, trainer: BatchTrainer) -> tuple[str, ...]:
        if (self.path / OPTIMIZER_PARTS).is_dir():
            _load_parts(trainer, self.path / OPTIMIZER_PARTS)
            groups = self.path / OPTIMIZER_GROUPS
            if not groups.exists():  # written by an older version
                return ()
            return _changed_groups(
                torch.load(groups, weights_only=True), trainer.optimizer.state_dict()["param_groups"]
            )
        several = trainer.ranks.size > 1  # then a rank reads only its part of the file
        where = "cpu" if several else trainer.model.device
        state = torch.load(self.path / OPTIMIZER_NAME, map_location=where, weights_only=True, mmap=several)
        return _load_moments(trainer.optimizer, state)


def save_checkpoint(
    root: Path,
    trainer: BatchTrainer,
    tokenizer: PreTrainedTokenizerBase | None,
    log: TrainedLog,
    position: CheckpointPosition,
    *,
    data_snapshot: bytes = b"",
    settings: Mapping[str, Any] | None = None,
    keep_last: int = 3,
) -> Checkpoint:
    """Write a checkpoint durably, then remove all except the newest `keep_last`. The log continues from the new file.
    `settings` are those of the recipe.

    Raises ValueError if position, trainer and log have different updates, or if the folder exists.
    """
    _check_agreement(trainer, log, position, keep_last)

    def files(folder: Path) -> None:
        _write_files(folder, trainer, tokenizer, log, data_snapshot)

    return _written(root, position, files, settings, lambda final: log.rebase(final / TRAINED_NAME), keep_last)


def copy_checkpoint(
    root: Path,
    trainer: BatchTrainer,
    tokenizer: PreTrainedTokenizerBase | None,
    log: TrainedLog,
    position: CheckpointPosition,
    *,
    data_snapshot: bytes = b"",
    settings: Mapping[str, Any] | None = None,
    keep_last: int = 3,
) -> Callable[[], Checkpoint]:
    """Copy what a checkpoint holds into the memory of the CPU. Return a function that writes the copy like
    `save_checkpoint`, in any thread, while the trainer continues.

    The log does not continue from the new file; its caller calls `TrainedLog.rebase`. The trainer must have one rank,
    and one copy may be written at a time. Raises ValueError if position, trainer and log have different updates.
    """
    _check_agreement(trainer, log, position, keep_last)
    if trainer.ranks.size > 1 or trainer.adapters is not None:
        raise ValueError("only the checkpoint of one rank without adapters can be copied")
    state = _CopiedState(
        weights=published_state(trainer.model, copied=True),
        optimizer=tree_map(_copied, trainer.optimizer.state_dict()),
        memory=tree_map(_copied, trainer.memory()),
    )
    trained = log.copy()

    def write() -> Checkpoint:
        def files(folder: Path) -> None:
            _write_files(folder, trainer, tokenizer, trained, data_snapshot, state)

        return _written(root, position, files, settings, lambda _: None, keep_last)

    return write


def _written(
    root: Path,
    position: CheckpointPosition,
    write_files: Callable[[Path], None],
    settings: Mapping[str, Any] | None,
    on_durable: Callable[[Path], None],
    keep_last: int,
) -> Checkpoint:
    """Write a checkpoint durably, call `on_durable` with its folder, and remove old ones."""
    final = root / folder_name(position)
    if final.exists():
        raise ValueError(f"{final} exists already")
    root.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(root)
    temporary = root / f"{TEMPORARY}{final.name}"
    temporary.mkdir()
    write_files(temporary)
    (temporary / SETTINGS_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(settings or {})))
    meta = write_meta(temporary, position)
    os.rename(temporary, final)
    sync(root)
    on_durable(final)
    for old in list_checkpoints(root)[:-keep_last]:
        shutil.rmtree(old)
    return Checkpoint(final, meta)


def _copied(value: Any) -> Any:
    """Return a copy of a leaf of nested containers: of a tensor, whole and on the CPU."""
    return whole(value.detach()).to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)


def save_part(root: Path, trainer: BatchTrainer, position: CheckpointPosition) -> None:
    """Write the part of a rank other than 0 into the checkpoint that rank 0 saves."""
    write_weights(trainer.model, None)
    _write_state(root / f"{TEMPORARY}{folder_name(position)}", trainer)


def latest_checkpoint(root: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint; None without a checkpoint. Raises CheckpointError if no checkpoint is
    intact."""
    found = newest_whole(root)
    return None if found is None else Checkpoint(found.path, found.meta, found.passed_by)


def _load_moments(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> tuple[str, ...]:
    """Load the moments of an optimizer, and keep its settings. Return the settings that differ.

    Raises ValueError if the moments are those of other parameters. A checkpoint of an older version has no names; its
    groups must have the sizes of the present ones."""
    present = optimizer.state_dict()["param_groups"]
    before = state["param_groups"]
    if all("param_names" in group for group in before):
        _in_present_order(state, before, present)
    elif [len(group["params"]) for group in before] != [len(group["params"]) for group in present]:
        raise ValueError("its optimizer has parameter groups of other sizes")
    if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        _divide(optimizer, state)
    optimizer.load_state_dict({"state": state["state"], "param_groups": present})
    return _changed_groups(before, present)


def _changed_groups(before: Sequence[Mapping[str, Any]], present: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the settings of parameter groups that differ, without the learning rate and the parameters."""
    changed = [
        f"{name} {old[name]} -> {value}"
        for old, new in zip(before, present, strict=False)
        for name, value in new.items()
        if name not in ("lr", "params", "param_names") and name in old and old[name] != value
    ]
    return tuple(dict.fromkeys(changed))


def _in_present_order(state: dict[str, Any], before: list[dict[str, Any]], present: list[dict[str, Any]]) -> None:
    """Give the moments the places that their parameters have in the present groups, in place."""
    stored = [name for group in before for name in group["param_names"]]
    wanted = [name for group in present for name in group["param_names"]]
    if others := sorted({*stored} ^ {*wanted}):
        raise ValueError(f"its optimizer has the moments of other parameters: {others[:4]}")
    places = {name: place for place, name in enumerate(stored)}
    state["state"] = {
        place: state["state"][places[name]] for place, name in enumerate(wanted) if places[name] in state["state"]
    }


def _check_agreement(trainer: BatchTrainer, log: TrainedLog, position: CheckpointPosition, keep_last: int) -> None:
    if keep_last < 1:
        raise ValueError(f"keep_last must be >= 1, got {keep_last}")
    if not trainer.step == log.update == position.update:
        raise ValueError(f"trainer at {trainer.step}, list at {log.update}, position at {position.update}")
    if position.digest != log.digest:
        raise ValueError(
            f"position.digest must equal the digest {log.digest} of update {position.update} in the list, got "
            f"{position.digest}"
        )
    if position.seed != trainer.seed:
        raise ValueError(f"position.seed must equal the trainer's seed {trainer.seed}, got {position.seed}")


def _write_files(
    folder: Path,
    trainer: BatchTrainer,
    tokenizer: PreTrainedTokenizerBase | None,
    log: TrainedLog,
    data_snapshot: bytes,
    state: _CopiedState | None = None,
) -> None:
    """Write all files but the settings and the meta data: from a copy of the trainer's state, or from the trainer."""
    if state is not None:
        write_model_folder(trainer.model, tokenizer, folder, state.weights)
        torch.save(state.optimizer, folder / OPTIMIZER_NAME)
        torch.save(state.memory, folder / PLUGINS_NAME)
    else:
        if trainer.adapters is None:
            write_model_folder(trainer.model, tokenizer, folder)
        else:
            trainer.adapters.write(folder)
            trainer.adapters.write_base(folder)
            if tokenizer is not None:
                save_tokenizer(tokenizer, folder)
        _write_state(folder, trainer)
    log.write_to(folder / TRAINED_NAME)
    (folder / SNAPSHOT_NAME).write_bytes(data_snapshot)


def _write_state(folder: Path, trainer: BatchTrainer) -> None:
    """Write the optimizer's state, and the memory of the parts. Every rank must call it; all write the former, rank 0
    the latter."""
    trainer.ranks.gathered(None)  # rank 0 has made the folder
    if trainer.ranks.size == 1:
        torch.save(tree_map_only(DTensor, whole, trainer.optimizer.state_dict()), folder / OPTIMIZER_NAME)
    else:
        state = {
            f"{name}/{key}": value
            for name, parameter in _parameters(trainer).items()
            for key, value in trainer.optimizer.state.get(parameter, {}).items()
        }
        save(state, storage_writer=FileSystemWriter(folder / OPTIMIZER_PARTS))
        if trainer.ranks.rank == 0:
            torch.save(trainer.optimizer.state_dict()["param_groups"], folder / OPTIMIZER_GROUPS)
    memory = trainer.memory()
    if trainer.ranks.rank == 0:
        torch.save(memory, folder / PLUGINS_NAME)


def _load_memory(path: Path, device: torch.device) -> dict[str, Any]:
    """Return the memory of the parts, on the device. The weights of a moving average stay in the file until they are
    read."""
    memory: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {
        name: value if name == "reference" else tree_map_only(Tensor, partial(_moved, device=device), value)
        for name, value in memory.items()
    }


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, copy=True)


def _load_parts(trainer: BatchTrainer, folder: Path) -> None:
    """Load the optimizer's state that several ranks wrote, each rank its part of it. Raises KeyError for another
    model."""
    reader, parameters = FileSystemReader(folder), _parameters(trainer)
    found: dict[str, Tensor] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        parameter = parameters[key.rpartition("/")[0]]
        assert isinstance(stored, TensorStorageMetadata), "only tensors were saved"
        like_parameter = stored.size == parameter.shape and not key.endswith("/step")
        found[key] = (
            torch.zeros_like(parameter) if like_parameter else torch.zeros(stored.size, device=parameter.device)
        )
    load(found, storage_reader=reader, no_dist=trainer.ranks.size == 1)
    trainer.optimizer.state.clear()
    for key, value in found.items():
        name, _, field = key.rpartition("/")
        trainer.optimizer.state[parameters[name]][field] = value


def _parameters(trainer: BatchTrainer) -> dict[str, Tensor]:
    """Return the parameters of the model and of the modules of loss terms by name."""
    parts = {"model": trainer.model, "modules": trainer.modules}
    return {f"{part}.{name}": p for part, module in parts.items() for name, p in module.named_parameters()}


def _divide(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Replace whole moments in a state dict by the parts of this rank, in place."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, values in state["state"].items():
        parameter = parameters[index]
        for key, value in values.items():
            if isinstance(parameter, DTensor) and value.shape == parameter.shape and key != "step":
                values[key] = torch.zeros_like(parameter)
                assign(values[key], value, value.shape)


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """Return the leaves of nested settings by their dotted keys."""
    if isinstance(value, dict) and value:
        return {
            k: v for name, inner in value.items() for k, v in _flat(inner, f"{key}.{name}" if key else name).items()
        }
    return {key: value}


def _remove_leftovers(root: Path) -> None:
    for path in root.iterdir():
        if path.name.startswith(TEMPORARY):
            shutil.rmtree(path)
