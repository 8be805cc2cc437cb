"""Compare the ledger with a checkpoint: with the position in its `rollmesh.json`, and update by update with the samples
that it lists."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

import msgspec

from rollmesh.services.coordinator.audit_report import CheckpointSummary
from rollmesh.services.coordinator.audit_updates import Updates
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.digest import INITIAL_DIGEST
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.checkpoint_files import META_NAME, CheckpointMeta, age
from rollmesh.trainer.trained_log import TrainedUpdate, read_lines

TRAINED_NAME = "trained.jsonl"
_FOLDER = re.compile(r"^update-(\d+)\.(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheckpoint:
    """The files of a checkpoint that an audit reads. Its trainer may remove the folder meanwhile."""

    path: Path
    meta: bytes | OSError
    """Content of rollmesh.json, or why it cannot be read."""
    trained: BufferedReader


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint with the list that `find_list` returns. Raises ConfigError."""
    path = find_list(folder)
    try:
        meta: bytes | OSError = (path.parent / META_NAME).read_bytes()
    except OSError as error:
        meta = error
    with path.open("rb") as trained:
        yield OpenCheckpoint(path=path.parent, meta=meta, trained=trained)


def check_checkpoint(
    checkpoint: OpenCheckpoint, updates: Updates, policy: str, complain: Callable[[str], None]
) -> CheckpointSummary:
    """Compare a checkpoint with the remaining updates of `policy`."""
    num, differs = 0, False
    last: TrainedUpdate | None = None
    list_hash = hashlib.file_digest(checkpoint.trained, "sha256").hexdigest()
    checkpoint.trained.seek(0)
    try:
        for line in read_lines(checkpoint.trained):
            last = line
            num += len(line.sample_ids)
            differs = not _check_line(line, updates, complain) or differs
        if differs:  # else the ledger shows that no sample is used twice
            checkpoint.trained.seek(0)
            _check_once(read_lines(checkpoint.trained), complain)
    except ValueError as error:
        complain(str(error))
    _check_meta(checkpoint, updates, policy, last, list_hash, complain)
    return CheckpointSummary(
        path=str(checkpoint.path),
        updates=last.update if last is not None else 0,
        samples=num,
        digest=last.digest if last is not None else "",
    )


def _check_meta(
    checkpoint: OpenCheckpoint,
    updates: Updates,
    policy: str,
    last: TrainedUpdate | None,
    list_hash: str,
    complain: Callable[[str], None],
) -> None:
    """Compare `rollmesh.json` with the ledger, the name of its folder, and the end of the list, which is `last`."""
    where = checkpoint.path / META_NAME
    try:
        if isinstance(checkpoint.meta, OSError):
            raise checkpoint.meta
        meta = msgspec.json.decode(checkpoint.meta, type=CheckpointMeta)
    except (OSError, *UNDECODABLE) as error:
        complain(f"{where} cannot be read: {error}")
        return
    if meta.update in updates.standing or meta.update == 0:
        if meta.digest != (digest := updates.digest_after(meta.update)):
            complain(f"{where}: the digest after update {meta.update} is {meta.digest!r}, {digest!r} in the ledger")
    elif last is None or not _in_doubt(last, updates):
        complain(f"{where}: the checkpoint is of update {meta.update}, the ledger ends at {updates.applied}")
    if (meta.update, meta.digest) != (end := (last.update, last.digest) if last is not None else (0, INITIAL_DIGEST)):
        complain(
            f"{where}: update {meta.update} with digest {meta.digest!r}, {TRAINED_NAME} ends with update {end[0]}, "
            f"{end[1]!r}"
        )
    if _FOLDER.match(checkpoint.path.name) and age(checkpoint.path) != (meta.incarnation, meta.update):
        complain(
            f"{where}: update {meta.update} of incarnation {meta.incarnation}, the folder is {checkpoint.path.name}"
        )
    if meta.policy != policy:
        complain(f"{where}: the weights are of policy {meta.policy!r}, the run trains {policy!r}")
    if meta.files.get(TRAINED_NAME, list_hash) != list_hash:
        complain(f"{where}: the SHA-256 of {TRAINED_NAME} is not the recorded one")


def find_list(folder: Path) -> Path:
    """Return `trained.jsonl` in the folder, or in the newest checkpoint below it: highest incarnation, then highest
    update."""
    if (folder / TRAINED_NAME).is_file():
        return folder / TRAINED_NAME
    children = folder.iterdir() if folder.is_dir() else ()
    found = [((int(m[2]), int(m[1])), child) for child in children if (m := _FOLDER.match(child.name))]
    if found and (path := max(found)[1] / TRAINED_NAME).is_file():
        return path
    raise ConfigError(
        f"{folder} has no {TRAINED_NAME} and no checkpoint with one; name a checkpoint folder of the built-in learner",
        folder=folder,
    )


def _check_once(lines: Iterable[TrainedUpdate], complain: Callable[[str], None]) -> None:
    seen: dict[str, int] = {}
    for line in lines:
        for sample in line.sample_ids:
            if sample in seen:
                complain(
                    f"the weights are trained twice on sample {sample}: in updates {seen[sample]} and {line.update}"
                )
            seen[sample] = line.update


def _check_line(line: TrainedUpdate, updates: Updates, complain: Callable[[str], None]) -> bool:
    """Compare one update, and return whether the ledger has it with the same samples."""
    standing = updates.standing.get(line.update)
    if standing is None:
        if not _in_doubt(line, updates):
            complain(f"the checkpoint contains update {line.update}, the ledger ends at {updates.applied}")
        return False
    used = standing.used
    _compare(line, used, complain)
    outcome = "APPLIED" if standing.applied else "SKIPPED"
    if (line.outcome, line.incarnation) != (outcome, standing.incarnation):
        complain(
            f"update {line.update} of the checkpoint is {line.outcome} in incarnation {line.incarnation}, {outcome} in "
            f"incarnation {standing.incarnation} in the ledger"
        )
    if line.digest != standing.digest:
        complain(
            f"digest after update {line.update}: {line.digest!r} in the checkpoint, {standing.digest!r} in the ledger"
        )
    return len(line.sample_ids) == len(used) and set(line.sample_ids) == used


def _in_doubt(line: TrainedUpdate, updates: Updates) -> bool:
    """Return whether a line beyond the ledger belongs to a held batch: its trainer has not committed, and the next
    attach resolves it."""
    batches = (b for b in updates.leases.open.values() if b.update == line.update == updates.applied + 1)
    return any(set(line.sample_ids) <= set(batch.sample_ids) for batch in batches)


def _compare(line: TrainedUpdate, used: set[str], complain: Callable[[str], None]) -> None:
    """Compare both sets of samples of an update."""
    trained = set(line.sample_ids)
    for sample in sorted(trained - used):
        complain(
            f"update {line.update} of the checkpoint trained on sample {sample}, which the ledger does not list there"
        )
    for sample in sorted(used - trained):
        complain(f"the ledger says that update {line.update} used sample {sample}, the checkpoint does not list it")
