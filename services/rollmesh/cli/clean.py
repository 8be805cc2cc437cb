"""`rollmesh clean`: what a run folder can do without, found first, removed afterwards.

Kept in any case: configuration, origin, model, series, metrics, report, logs, and the newest checkpoints. Without `for_good`, all that a
resume needs stays too, the ledger above all: a run that has ended can be resumed under other limits. With it the ledger is removed after
its audit was written to audit.json, which `rollmesh audit` prints from then on.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollmesh.cli.audit import audit_folder
from rollmesh.cli.run_folder import RunFolder
from rollmesh.mesh.run_lock import owned
from rollmesh.shared.errors import MeshError

_CHECKPOINT = re.compile(r"update-(\d+)\.(\d+)")
_LEDGER = ("nats", "coordinator")
_CACHES = ("depot", "inference-*", "sandbox-*")
"""Uploaded, fetched or made again when the run goes on."""


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to remove."""

    path: str
    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanOptions:
    """What the person asked for."""

    keep_last: int = 1
    for_good: bool = False
    """Also what a resume needs."""
    dry_run: bool = False


def clean_folder(root: Path, options: CleanOptions) -> tuple[list[Removal], str]:
    """(what was removed or would be, a remark). Raises ConfigError if `root` is no run's folder, RunFolderBusy if it is running."""
    folder = RunFolder(root.resolve())
    folder.read_origin()
    with owned(folder.root):
        removals = [*_checkpoints(folder, options.keep_last), *_caches(folder)]
        remark = ""
        if options.for_good:
            removals += _ledger(folder)
            remark = "" if options.dry_run else _audited(folder)
        if not options.dry_run:
            for removal in removals:
                _remove(Path(removal.path))
    return removals, remark


def _checkpoints(folder: RunFolder, keep_last: int) -> Iterator[Removal]:
    """All but the newest, by incarnation and update, and what crashes have left half-written."""
    root = folder.root / "checkpoints"
    found: list[tuple[int, int, Path]] = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if match := _CHECKPOINT.fullmatch(path.name):
            found.append((int(match[2]), int(match[1]), path))
        else:
            yield _removal(path, "a checkpoint that was never finished")
    for *_, path in sorted(found)[: max(0, len(found) - keep_last)]:
        yield _removal(path, f"older than the newest {keep_last}")


def _caches(folder: RunFolder) -> Iterator[Removal]:
    for pattern in _CACHES:
        for path in sorted(folder.root.glob(pattern)):
            yield _removal(path, "made again when it is needed")


def _ledger(folder: RunFolder) -> list[Removal]:
    why = "asked for: the run cannot be resumed without it"
    return [_removal(folder.root / name, why) for name in _LEDGER if (folder.root / name).exists()]


def _audited(folder: RunFolder) -> str:
    """Write the audit of a ledger that is about to be removed. Returns a remark if it could not be made or does not hold."""
    if not folder.was_started or folder.ledger_was_removed:
        return ""
    try:
        holds, report = audit_folder(folder.root, as_json=True)
    except MeshError as error:
        return f"warning: the ledger could not be audited before it was removed: {error}"
    folder.audit.write_text(report, encoding="utf-8")
    return "" if holds else f"warning: the audit of the removed ledger does not hold; see {folder.audit}"


def _removal(path: Path, why: str) -> Removal:
    return Removal(path=str(path), num_bytes=_size(path), why=why)


def _size(path: Path) -> int:
    """Bytes on disk; a file with several names counts once."""
    seen: dict[tuple[int, int], int] = {}
    for entry in _files(path):
        stat = entry.lstat()
        seen[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(seen.values())


def _files(path: Path) -> Iterable[Path]:
    return (entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else (path,)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
