"""`rollmesh clean`: find what a run folder does not need, then remove it.

Configuration, origin, model, series, metrics, report, logs and the newest checkpoints are always kept. Without
--for-good everything that a resume needs is kept too, above all the ledger: an ended run can be resumed with other
limits. With it the ledger is removed after its audit was written to audit.json, which `rollmesh audit` prints from then
on.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmesh.cli.app import AsJson, app, report_errors

if TYPE_CHECKING:
    from rollmesh.app.run_folder import RunFolder

_CHECKPOINT = re.compile(r"update-(\d+)\.(\d+)")
_LEDGER = ("nats", "archive", "payloads", "coordinator")
_CACHES = ("depot", "inference-*", "sandbox-*")
"""Uploaded, fetched or created again when the run is resumed."""


@app.command()
def clean(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs that are not running.")],
    keep_last: Annotated[int, typer.Option(min=1, help="Number of checkpoints to keep, the newest ones.")] = 1,
    for_good: Annotated[
        bool, typer.Option("--for-good", help="Also remove what a resume needs: ledger and streams.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove old checkpoints and cached weights. With --for-good, also ledger and streams, after an audit."""
    import json

    with report_errors():
        options = CleanOptions(keep_last=keep_last, for_good=for_good, dry_run=dry_run)
        for run in runs:
            removals, remark = clean_folder(run, options)
            if as_json:
                found = [{"path": r.path, "num_bytes": r.num_bytes, "why": r.why} for r in removals]
                typer.echo(json.dumps({"run": str(run), "dry_run": dry_run, "removed": found, "remark": remark}))
                continue
            for removal in removals:
                typer.echo(f"{removal.num_bytes / 2**20:>10.1f} MiB  {removal.path}  ({removal.why})")
            total = sum(removal.num_bytes for removal in removals) / 2**20
            typer.echo(f"{total:>10.1f} MiB  {'would be freed' if dry_run else 'freed'} in {run}")
            if remark:
                typer.echo(remark, err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """A file or folder to remove."""

    path: str
    num_bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanOptions:
    """The options of the command."""

    keep_last: int = 1
    for_good: bool = False
    """Remove also what a resume needs."""
    dry_run: bool = False


def clean_folder(root: Path, options: CleanOptions) -> tuple[list[Removal], str]:
    """Return (what was removed or would be, a remark).

    Raises ConfigError if `root` is not a run's folder, RunFolderBusy if the run is running.
    """
    from rollmesh.app.run_folder import RunFolder
    from rollmesh.mesh.run_lock import owned

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
    """Yield all checkpoints but the newest, by incarnation and update, and those that a crash left incomplete."""
    root = folder.root / "checkpoints"
    found: list[tuple[int, int, Path]] = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if match := _CHECKPOINT.fullmatch(path.name):
            found.append((int(match[2]), int(match[1]), path))
        else:
            yield _removal(path, "an incomplete checkpoint")
    for *_, path in sorted(found)[: max(0, len(found) - keep_last)]:
        yield _removal(path, f"older than the newest {keep_last}")


def _caches(folder: RunFolder) -> Iterator[Removal]:
    for pattern in _CACHES:
        for path in sorted(folder.root.glob(pattern)):
            yield _removal(path, "created again when it is needed")


def _ledger(folder: RunFolder) -> list[Removal]:
    why = "requested: the run cannot be resumed without it"
    return [_removal(folder.root / name, why) for name in _LEDGER if (folder.root / name).exists()]


def _audited(folder: RunFolder) -> str:
    """Write the audit of a ledger that is about to be removed. Return a remark if it fails or does not hold."""
    from rollmesh.app.folder_audit import audit_folder
    from rollmesh.shared.errors import MeshError

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
    """Return the bytes on disk. A file with several names counts once."""
    seen: dict[tuple[int, int], int] = {}
    for entry in (entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else (path,):
        stat = entry.lstat()
        seen[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(seen.values())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
