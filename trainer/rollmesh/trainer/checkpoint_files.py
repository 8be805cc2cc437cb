"""Checkpoint folders on disk: which there are, whether one is whole, and what to do about one that isn't. Free of torch.

`rollmesh.json` in each folder holds its position and the SHA-256 of every other file. A folder under its final name was complete when it
was renamed; whether it still is, only the hashes tell. A damaged one is set aside under a name that nothing reads (`corrupt-update-...`)
and kept for whoever wants to know why; the next older one is used, and told: going back to older weights is a roll-back with a new
incarnation, never a detail. With no whole one left, nothing is moved and nothing is begun anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollmesh.shared.digest import INITIAL_DIGEST
from rollmesh.shared.ledger_head import EMPTY, LedgerHead

META_NAME = "rollmesh.json"
TRAINED_NAME = "trained.jsonl"
SNAPSHOT_NAME = "data_snapshot.bin"
TEMPORARY = ".tmp-checkpoint-"
FORMAT = 1

_FOLDER = re.compile(r"^update-(\d{8,})\.(\d+)$")
_ASIDE = "corrupt-"


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
    head: LedgerHead = EMPTY
    """Head of the ledger that contains the commit of `update`; empty if unknown."""
    config_digest: str = ""
    """Digest of the resolved configuration of the run, to notice a resume under another one."""


class CheckpointMeta(CheckpointPosition, frozen=True, kw_only=True):
    """rollmesh.json."""

    format: int = FORMAT
    files: dict[str, str] = {}
    """File name -> SHA-256 hex."""


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """A folder whose files are what they were when it was written."""

    path: Path
    meta: CheckpointMeta
    passed_by: tuple[str, ...] = ()
    """What was wrong with newer ones, in words, newest first; they are set aside."""


def folder_name(position: CheckpointPosition) -> str:
    return f"update-{position.update:08d}.{position.incarnation}"


def list_checkpoints(root: Path) -> list[Path]:
    """Whole checkpoints, oldest first: by incarnation, then update (a roll-back's updates replace the older incarnation's)."""
    entries = root.iterdir() if root.is_dir() else ()
    return sorted((path for path in entries if _FOLDER.match(path.name) and path.is_dir()), key=age)


def age(folder: Path) -> tuple[int, int]:
    """(incarnation, update) of a checkpoint's folder, by its name. ValueError if it is none."""
    if (match := _FOLDER.match(folder.name)) is None:
        raise ValueError(f"{folder.name} is not the name of a checkpoint")
    return int(match[2]), int(match[1])


def newest_whole(root: Path) -> WholeCheckpoint | None:
    """The newest checkpoint whose files are whole; damaged newer ones are set aside. None if there is none at all.

    Raises CheckpointError if none is whole: beginning again from the initial weights is for a person to decide.
    """
    damage: list[tuple[Path, str]] = []
    for path in reversed(list_checkpoints(root)):
        try:
            meta = verify(path)
        except CheckpointError as error:
            damage.append((path, str(error)))
            continue
        passed_by = tuple(_set_aside(damaged, error, path) for damaged, error in damage)
        return WholeCheckpoint(path, meta, passed_by)
    if damage:
        raise CheckpointError(
            f"{damage[0][1]}; no checkpoint in {root} is whole: bring one back, or remove {root} to start from the initial weights"
        )
    return None


def verify(path: Path) -> CheckpointMeta:
    """Hold one folder against its hashes. Raises CheckpointError naming the file that is missing, malformed or altered."""
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
    return meta


def write_meta(folder: Path, position: CheckpointPosition) -> CheckpointMeta:
    """Hash and sync every file of a folder that is to be a checkpoint, then write rollmesh.json last."""
    files = {}
    for path in sorted(folder.iterdir()):
        sync(path)
        files[path.name] = _sha256(path)
    meta = CheckpointMeta(
        **{name: getattr(position, name) for name in CheckpointPosition.__struct_fields__}, files=files
    )
    (folder / META_NAME).write_text(json.dumps(msgspec.to_builtins(meta), indent=2) + "\n")
    sync(folder / META_NAME)
    sync(folder)
    return meta


def sync(path: Path) -> None:
    """fsync a file or folder: a rename is durable only once the folder is, too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(damaged: Path, error: str, instead: Path) -> str:
    aside = damaged.with_name(_ASIDE + damaged.name)
    number = 1
    while aside.exists():
        number += 1
        aside = damaged.with_name(f"{_ASIDE}{damaged.name}-{number}")
    damaged.rename(aside)
    sync(aside.parent)
    return f"{error}; {damaged.name} is set aside as {aside.name}, going back to {instead.name}"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
