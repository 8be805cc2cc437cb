"""List and verify the checkpoint folders on disk, and set damaged ones aside. Free of torch.

`rollmesh.json` in each folder has its position and the SHA-256 of every other file. A folder with its final name was
complete when it was renamed, and the hashes show whether it still is. A damaged folder is renamed to
`corrupt-update-...`, which no code reads, and kept for inspection. The next older one is used, and this is reported,
because a return to older weights is a roll-back with a new incarnation. If no checkpoint is intact, nothing is renamed
and the trainer does not start.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.digest import INITIAL_DIGEST
from rollmesh.shared.domain.formats import NewerFormat, check_format
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead

META_NAME = "rollmesh.json"
TRAINED_NAME = "trained.jsonl"
SNAPSHOT_NAME = "data_snapshot.bin"
TEMPORARY = ".tmp-checkpoint-"
FORMAT = 1

_FOLDER = re.compile(r"^update-(\d{8,})\.(\d+)$")
_ASIDE = "corrupt-"


class CheckpointError(ValueError):
    """A checkpoint cannot be used. The message names the file and the remedy."""


class NewerCheckpoint(CheckpointError):
    """A later release wrote the checkpoint. It is not damaged."""


class CheckpointPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Position of a run at a checkpoint: everything that a learner needs to attach again."""

    update: int
    """Number of updates in the weights; 0 is a checkpoint of the initial weights."""
    policy: str = "main"
    incarnation: int = 0
    digest: str = INITIAL_DIGEST
    """Commit digest after `update`."""
    seed: int = 0
    head: LedgerHead = EMPTY
    """Head of the ledger that contains the commit of `update`; empty if unknown."""
    config_digest: str = ""
    """Digest of the resolved configuration of the run, to detect a resume under another one."""


class CheckpointMeta(CheckpointPosition, frozen=True, kw_only=True):
    """Content of rollmesh.json."""

    format: int = FORMAT
    files: dict[str, str] = {}
    """File name -> SHA-256 hex."""


class _MetaFormat(msgspec.Struct):
    """The part of rollmesh.json that every release reads."""

    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class WholeCheckpoint:
    """A folder whose files are unchanged since it was written."""

    path: Path
    meta: CheckpointMeta
    passed_by: tuple[str, ...] = ()
    """Errors of newer checkpoints, which were set aside; newest first."""


def folder_name(position: CheckpointPosition) -> str:
    return f"update-{position.update:08d}.{position.incarnation}"


def list_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints, oldest first: by incarnation, then update, because a roll-back replaces updates of the
    older incarnation."""
    entries = root.iterdir() if root.is_dir() else ()
    return sorted((path for path in entries if _FOLDER.match(path.name) and path.is_dir()), key=age)


def age(folder: Path) -> tuple[int, int]:
    """Return (incarnation, update) of a checkpoint from the name of its folder. Raises ValueError for another name."""
    if (match := _FOLDER.match(folder.name)) is None:
        raise ValueError(f"{folder.name} is not the name of a checkpoint")
    return int(match[2]), int(match[1])


def newest_whole(root: Path) -> WholeCheckpoint | None:
    """Return the newest intact checkpoint, and set aside damaged newer ones. Return None if there is no checkpoint.

    Raises CheckpointError if no checkpoint is intact, because an operator must decide to start from the initial
    weights. Raises NewerCheckpoint without renaming anything if a later release wrote the newest one, because its
    updates would be undone.
    """
    damage: list[tuple[Path, str]] = []
    for path in reversed(list_checkpoints(root)):
        try:
            meta = verify(path)
        except NewerCheckpoint:
            raise
        except CheckpointError as error:
            damage.append((path, str(error)))
            continue
        passed_by = tuple(_set_aside(damaged, error, path) for damaged, error in damage)
        return WholeCheckpoint(path, meta, passed_by)
    if damage:
        raise CheckpointError(
            f"{damage[0][1]}; no checkpoint in {root} is intact: restore one, or remove {root} to start from the "
            "initial weights"
        )
    return None


def verify(path: Path) -> CheckpointMeta:
    """Compare one folder with its hashes. Raises CheckpointError naming the file that is missing, malformed or changed,
    NewerCheckpoint."""
    meta_path = path / META_NAME
    try:
        content = meta_path.read_bytes()
        check_format(str(meta_path), msgspec.json.decode(content, type=_MetaFormat).format, FORMAT)
        meta = msgspec.json.decode(content, type=CheckpointMeta)
    except NewerFormat as error:
        raise NewerCheckpoint(str(error)) from error
    except (OSError, *UNDECODABLE) as error:
        raise CheckpointError(f"checkpoint file {meta_path} cannot be read: {error}") from error
    for name, expected in meta.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint file {file} is missing")
        if _sha256(file) != expected:
            raise CheckpointError(f"checkpoint file {file} is corrupt: its SHA-256 is not the recorded one")
    return meta


def write_meta(folder: Path, position: CheckpointPosition) -> CheckpointMeta:
    """Hash and sync every file of a new checkpoint folder, then write rollmesh.json."""
    files = {}
    for path in sorted(folder.rglob("*")):
        sync(path)
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = _sha256(path)
    meta = CheckpointMeta(
        **{name: getattr(position, name) for name in CheckpointPosition.__struct_fields__}, files=files
    )
    (folder / META_NAME).write_text(json.dumps(msgspec.to_builtins(meta), indent=2) + "\n")
    sync(folder / META_NAME)
    sync(folder)
    return meta


def sync(path: Path) -> None:
    """Call fsync on a file or folder. A rename is durable only after the folder is synced."""
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
