"""`rollmesh backup`: the streams of a run, and the files that a resume needs beside them, as one file. The run may be
running.

The ledger is copied as its stream has it, with the archive segments of the records before as they are.
The samples are read before the ledger and again after it. So every payload that a ledger record names is in the backup,
also one that is stored or purged meanwhile. Checkpoints and the depot are not part of it: weights are large and do not
change once written, so copy the folder `checkpoints` before the backup: the ledger must have all updates of a
checkpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rollmesh.app.backup.backup_file import (
    FORMAT,
    PART_BYTES,
    BackupAbout,
    BackupSummary,
    BackupWriter,
    Kind,
    StreamPart,
    verify_backup,
)
from rollmesh.app.config import TrainConfig
from rollmesh.app.mesh_client import MeshAddress
from rollmesh.app.run_bus import run_bus
from rollmesh.app.run_folder import RunFolder, open_folder
from rollmesh.mesh.changes import RECORDED
from rollmesh.mesh.joining import ask_mesh
from rollmesh.mesh.run_layout import PAYLOADS
from rollmesh.shared.bus.archive_bus import ArchivedLedger, open_ledger
from rollmesh.shared.bus.bus import Bus, StreamRecord, UnknownStream
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.config.loader import to_yaml
from rollmesh.shared.errors import ConfigError, DataLoss, UnknownRun
from rollmesh.shared.store.payload_files import REPLAY

_SKIPPED = ("ended.json",)
"""The marker of an ended run: the coordinator writes it again."""
_FILES = (
    "model/**/*",
    "coordinator/runs/{run}/**/*",
    f"{PAYLOADS}/{{run}}/*",
    f"{PAYLOADS}/{{run}}/{REPLAY}/*",
    "publishing/*.json",
    "publishing/*.manifest",
    RECORDED,
)
"""Files of the run folder that are copied: a model that was made for the run, snapshots of the coordinator, payload
files without those that `retain_share` kept (an archive has no holes), the probes and the manifest of the newest
version, and the settings that the ledger has recorded. Without the manifest a learner cannot publish that version
again, because its digest differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupSource:
    """What a backup reads."""

    bus: Bus
    about: BackupAbout
    root: Path | None = None
    """The run folder; None if the mesh was reached over the network."""


def back_up_folder(run: Path, path: Path, *, name: str = "") -> BackupSummary:
    """Back up the run of a folder. Raises UnknownRun, DataLoss, AlreadyExists, ConfigError, BusUnavailable."""
    return asyncio.run(_back_up_folder(run, path, name))


async def _back_up_folder(run: Path, path: Path, name: str) -> BackupSummary:
    folder, config, base_dir = open_folder(run, [])
    async with _folder_source(folder, config, base_dir, name or config.run.name) as source:
        return await write_backup(source, path)


@asynccontextmanager
async def _folder_source(
    folder: RunFolder, config: TrainConfig, base_dir: Path, name: str
) -> AsyncIterator[BackupSource]:
    about = BackupAbout(
        format=FORMAT,
        run=name,
        created_unix_s=time.time(),
        config_yaml=to_yaml(config),
        origin_json=folder.origin.read_text(encoding="utf-8"),
        base_dir=str(base_dir),
    )
    async with run_bus(folder, config) as bus:
        yield BackupSource(bus=bus, about=about, root=folder.root)


def back_up_mesh(mesh: MeshAddress, path: Path, *, name: str = "", login_file: Path | None = None) -> BackupSummary:
    """Back up a run of a mesh that runs elsewhere. Raises as `back_up_folder`, and ConfigError if payloads are in files
    of its host."""
    return asyncio.run(_back_up_mesh(mesh, path, name, login_file))


async def _back_up_mesh(mesh: MeshAddress, path: Path, name: str, login_file: Path | None) -> BackupSummary:
    described = await ask_mesh(mesh.address, mesh.access)
    if described.payloads == "files":
        raise ConfigError(
            "the mesh stores payloads in files of its host (`bus.payloads`), which a backup over the network lacks; "
            f"run `rollmesh backup FILE --run FOLDER` on the host of {mesh.address}"
        )
    tree: dict[str, Any] = yaml.safe_load(described.config_yaml)
    about = BackupAbout(
        format=FORMAT,
        run=name or str(tree["run"]["name"]),
        created_unix_s=time.time(),
        config_yaml=described.config_yaml,
        origin_json="",
        base_dir=described.base_dir,
    )
    login = BusLogin.of(mesh.access) if login_file is None else BusLogin.read(login_file, mesh.access.tls)
    bus = await JetStreamBus.connect(described.bus_url, login=login)
    try:
        return await write_backup(BackupSource(bus=bus, about=about), path)
    finally:
        await bus.close()


async def write_backup(source: BackupSource, path: Path) -> BackupSummary:
    """Write the file and verify it. Raises UnknownRun, DataLoss, AlreadyExists, DiskFull."""
    run = source.about.run
    with BackupWriter(path) as out:
        out.add(source.about)
        try:
            samples = await _copy(source.bus, run, "samples", out)
        except UnknownStream as err:
            raise UnknownRun(f"there is no run {run!r} on this bus; name one with --run-name", run=run) from err
        sizes = await asyncio.to_thread(_copy_files, source, out, {})
        # What was stored during the first pass, which may take minutes. A payload can be purged before the last pass.
        samples = await _copy(source.bus, run, "samples", out, after=samples)
        ledger = await _copy(source.bus, run, "ledger", out)
        await _copy_archive(source, out, ledger)
        await asyncio.to_thread(_copy_files, source, out, sizes)
        await _copy(source.bus, run, "samples", out, after=samples)
        await _copy(source.bus, run, "dead", out)
        await asyncio.to_thread(out.finish)
    return (await asyncio.to_thread(verify_backup, path))[1]


async def _copy(bus: Bus, run: str, kind: Kind, out: BackupWriter, *, after: int | None = None) -> int:
    """Copy the records of a stream, or those after `after`. Return the sequence of the last one that it has had."""
    log = await bus.open(getattr(run_streams(run), kind).name)
    first_seq = (await log.info()).first_seq
    last, records, size = max(after or 0, first_seq - 1), list[StreamRecord](), 0
    async for record in log.read_range(last + 1):
        records.append(record)
        size += len(record.payload) + len(record.msg_id)  # a payload may be empty
        last = record.seq
        if size >= PART_BYTES:
            out.add(StreamPart(kind=kind, first_seq=first_seq, records=records))
            records, size = [], 0
    if records or after is None:
        out.add(StreamPart(kind=kind, first_seq=first_seq, records=records))
    return last


async def _copy_archive(source: BackupSource, out: BackupWriter, last: int) -> None:
    """Copy the archive segments before the part of the ledger that was copied, of which `last` is the last record, and
    those that it names, because the coordinator of a restored run purges their records."""
    ledger = await open_ledger(source.bus, source.about.run)
    at, first = 1, out.ledger_first
    if not last:
        raise DataLoss(f"{ledger.name} has no first record, so the run cannot be recovered from it", ledger=ledger.name)
    if at < first and (source.root is None or not isinstance(ledger, ArchivedLedger) or ledger.files is None):
        raise ConfigError(
            f"records 1 to {first - 1} of {ledger.name} are in archive segments of the run's host, which this backup "
            "cannot read; run `rollmesh backup FILE --run FOLDER` there"
        )
    if source.root is None or not isinstance(ledger, ArchivedLedger) or ledger.files is None:
        return
    named = {(fact.number, fact.sha256[:16]) for fact in out.sealed.values()}
    archived = max((fact.last for fact in out.sealed.values()), default=0)
    while at < first or at <= archived:
        found = [s for s in await asyncio.to_thread(ledger.files.segments) if s.first == at]
        segment = next((s for s in found if (s.number, s.digest) in named), found[0] if found else None)
        if segment is None and at >= first:
            return  # its records are in the stream, and stay there
        if segment is None:
            raise DataLoss(
                f"the archive segment with record {at} of {ledger.name} is missing in {ledger.files.folder}; copy it "
                "from another backup into this folder",
                ledger=ledger.name,
            )
        with segment.path.open("rb") as file:
            await asyncio.to_thread(out.add_file, str(segment.path.relative_to(source.root)), file)
        at = segment.last + 1


def _copy_files(source: BackupSource, out: BackupWriter, known: dict[str, int]) -> dict[str, int]:
    """Copy the files whose size is not the known one. Return all sizes."""
    sizes = dict(known)
    for path, name in copied_files(source):
        try:
            if known.get(name) != path.stat().st_size:
                with path.open("rb") as file:
                    sizes[name] = out.add_file(name, file)
        except FileNotFoundError:
            continue  # removed meanwhile, because it is no longer needed
    return sizes


def copied_files(source: BackupSource) -> Iterator[tuple[Path, str]]:
    """Yield the files of the run folder that a backup has, and their names in it."""
    if source.root is None:
        return
    for pattern in _FILES:
        for path in sorted(source.root.glob(pattern.format(run=source.about.run))):
            if path.is_file() and not path.is_symlink() and path.name not in _SKIPPED and path.suffix != ".partial":
                yield path, str(path.relative_to(source.root))


def summary_text(summary: BackupSummary, path: Path) -> str:
    """Return the summary for a terminal."""
    records = ", ".join(f"{num} {kind}" for kind, num in summary.num_records.items())
    return (
        f"{path}: run {summary.run}, {records}, {summary.num_files} files, {summary.num_bytes >> 10} KiB\n"
        f"ledger head {summary.position}:{summary.hash}"
    )
