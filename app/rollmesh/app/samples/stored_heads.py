"""Ledger heads that the folder of a run stores outside the ledger: in checkpoints, gateway files and the summary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from rollmesh.app.run_folder import RunFolder
from rollmesh.services.coordinator.audit_chain import StoredHead
from rollmesh.services.gateway.heads import NAME, read_heads
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead
from rollmesh.trainer.checkpoint_files import META_NAME, CheckpointMeta, list_checkpoints

T = TypeVar("T")


class _Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of summary.json about the ledger."""

    run: str = ""
    ledger_head: LedgerHead = EMPTY


def stored_heads(folder: RunFolder, run: str, checkpoint: Path | None) -> list[StoredHead]:
    """Return every stored head of the ledger of `run`, in the folder and in `checkpoint`. An unreadable file is
    skipped.

    The checkpoints in the folder belong to the configured run. `checkpoint` is None for another run.
    """
    found = list(_of_gateways(folder.root, run))
    if checkpoint is not None:
        paths = dict.fromkeys([*list_checkpoints(folder.checkpoints), checkpoint])
        found += [
            StoredHead(f"checkpoint {path.name}", head) for path in paths if (head := head_of_checkpoint(path)).hash
        ]
    summary = _read(folder.summary, _Summary)
    if summary is not None and summary.run == run and summary.ledger_head.hash:
        found.append(StoredHead(folder.summary.name, summary.ledger_head))
    return found


def _of_gateways(root: Path, run: str) -> Iterator[StoredHead]:
    for path in sorted(root.glob(f"*/{NAME}")):
        head = read_heads(path).get(run)
        if head is not None:
            yield StoredHead(path.parent.name, head)


def head_of_checkpoint(path: Path) -> LedgerHead:
    """Return the head in a checkpoint folder; EMPTY if it has none, or cannot be read."""
    meta = _read(path / META_NAME, CheckpointMeta)
    return meta.head if meta is not None else EMPTY


def _read(path: Path, type_: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type_)
    except (OSError, *UNDECODABLE):
        return None
