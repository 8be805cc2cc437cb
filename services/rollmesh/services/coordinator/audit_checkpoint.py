"""Compare the ledger with the samples that a checkpoint lists, update by update."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from rollmesh.services.coordinator.audit_report import CheckpointSummary
from rollmesh.services.coordinator.audit_updates import Updates
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.trained_log import TrainedUpdate, read_lines

TRAINED_NAME = "trained.jsonl"
_FOLDER = re.compile(r"^update-(\d+)\.(\d+)$")


def check_checkpoint(trained: BinaryIO, updates: Updates, complain: Callable[[str], None]) -> CheckpointSummary:
    """Compare the list of a checkpoint, which `open_list` opened, with the remaining updates."""
    seen: dict[str, int] = {}
    last: TrainedUpdate | None = None
    try:
        for line in read_lines(trained):
            last = line
            _check_line(line, updates, seen, complain)
    except ValueError as error:
        complain(str(error))
    return CheckpointSummary(
        path=str(Path(trained.name).parent),
        updates=last.update if last is not None else 0,
        samples=len(seen),
        digest=last.digest if last is not None else "",
    )


def open_list(folder: Path) -> BinaryIO:
    """Open the list that `find_list` returns, so that it can be read after its trainer has removed the checkpoint. Raises ConfigError."""
    return find_list(folder).open("rb")


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


def _check_line(line: TrainedUpdate, updates: Updates, seen: dict[str, int], complain: Callable[[str], None]) -> None:
    for sample in line.sample_ids:
        if sample in seen:
            complain(f"the weights are trained twice on sample {sample}: in updates {seen[sample]} and {line.update}")
        seen[sample] = line.update
    standing = updates.standing.get(line.update)
    if standing is None:
        if not _in_doubt(line, updates):
            complain(f"the checkpoint contains update {line.update}, the ledger ends at {updates.applied}")
        return
    _compare(line, set(standing.used), complain)
    if line.digest != standing.digest:
        complain(
            f"digest after update {line.update}: {line.digest!r} in the checkpoint, {standing.digest!r} in the ledger"
        )


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
