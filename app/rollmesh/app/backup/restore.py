"""`rollmesh restore`: write a backup into streams that do not exist, and create a run folder from which the run is
resumed.

The whole file is verified first. While records are written, no coordinator can open the streams: they get their
subjects at the end, the ledger last. An interrupted restore is continued by the same command.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from rollmesh.app.backup.backup_file import (
    KINDS,
    BackupAbout,
    BackupSummary,
    FilePart,
    Kind,
    StreamPart,
    read_backup,
    verify_backup,
)
from rollmesh.app.config import TrainConfig, load_train_config
from rollmesh.app.run_bus import nats_of
from rollmesh.app.run_folder import RESTORING, Origin, RunFolder, claim_folder, origin_now, run_config
from rollmesh.mesh.changes import note_recorded, settings_of
from rollmesh.mesh.run_layout import ARCHIVE, PAYLOADS, open_layout
from rollmesh.mesh.run_lock import owned
from rollmesh.shared.bus.bus import StreamLog, StreamRecord, StreamSpec
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import AlreadyExists, DataLoss
from rollmesh.shared.store.disk import disk_full_errors
from rollmesh.shared.store.private_files import private_opener
from rollmesh.shared.store.whole_files import write_whole

_PENDING_MAX = 256
_PRIVATE = (f"{ARCHIVE}/", f"{PAYLOADS}/", "coordinator/")
"""Files that only their owner can read."""


class _Marker(msgspec.Struct, frozen=True):
    """The file RESTORING."""

    digest: str
    """SHA-256 of the backup."""
    stored: bool = False
    """Whether all records and files are written, so that the streams are being made usable."""


def restore_backup(path: Path, out: Path, overrides: Sequence[str] = ()) -> BackupSummary:
    """Restore a backup into the folder `out` and the bus of its configuration. `overrides` change settings, such as
    `bus.url`.

    Raises ConfigError, DataLoss for a damaged file, AlreadyExists if the folder or a stream of the run exists,
    BusUnavailable.
    """
    about, summary = verify_backup(path)
    folder = _claim(out, summary)
    with owned(folder.root):
        config, base_dir = _write_config(folder, about, overrides)
        asyncio.run(_restore(path, summary, folder, config, base_dir))
        (folder.root / RESTORING).unlink()
    return summary


def _claim(out: Path, summary: BackupSummary) -> RunFolder:
    """Return the new folder, or that of an interrupted restore of the same backup. Raises RunExistsHere,
    AlreadyExists."""
    marker = out / RESTORING
    if marker.exists():
        if msgspec.json.decode(marker.read_bytes(), type=_Marker).digest != summary.digest:
            raise AlreadyExists(
                f"{out}: a restore of another backup was interrupted here; remove the folder, or choose another --out"
            )
        return RunFolder(out.resolve())
    folder = RunFolder(claim_folder(summary.run, out))
    _mark(folder, _Marker(summary.digest))
    return folder


def _mark(folder: RunFolder, marker: _Marker) -> None:
    write_whole(folder.root / RESTORING, msgspec.json.encode(marker), private=False)


def _write_config(folder: RunFolder, about: BackupAbout, overrides: Sequence[str]) -> tuple[TrainConfig, Path]:
    folder.config.write_text(about.config_yaml, encoding="utf-8")
    # As the ledger has recorded them, so that a resume with other settings changes them. A backup of a folder has its
    # own list.
    before = run_config(folder, load_train_config(folder.config))
    note_recorded(folder.root, settings_of(before, folder.root))
    config = load_train_config(folder.config, list(overrides))
    base = Path(about.base_dir)
    if about.origin_json:
        origin = msgspec.json.decode(about.origin_json, type=Origin)
    else:
        origin = origin_now(["rollmesh", "restore"], base if base.is_dir() else Path.cwd())
    folder.write(config, origin)
    return config, Path(origin.base_dir)


async def _restore(path: Path, summary: BackupSummary, folder: RunFolder, config: TrainConfig, base_dir: Path) -> None:
    layout = open_layout(config, run_dir=folder.root, base_dir=base_dir)
    streams = run_streams(summary.run, config.coordinator.streams)
    specs: dict[Kind, StreamSpec] = {kind: getattr(streams, kind) for kind in KINDS}
    async with nats_of(layout) as url:
        bus = await JetStreamBus.connect(url, login=layout.bus_login())
        try:
            _, complete = await bus.begin_restore(
                specs["ledger"], first_seq=summary.first_position, backup=summary.digest
            )
            if complete:
                if msgspec.json.decode((folder.root / RESTORING).read_bytes(), type=_Marker).stored:
                    return  # this restore was interrupted after its last step
                raise AlreadyExists(
                    f"{streams.ledger.name} exists; a restore never overwrites a stream. Delete that run first "
                    "(`rollmesh delete`), or use another NATS"
                )
            writers: dict[Kind, _StreamWriter] = {}
            for part in read_backup(path):
                match part:
                    case StreamPart():
                        if part.kind not in writers:
                            log, _ = await bus.begin_restore(
                                specs[part.kind], first_seq=part.first_seq, backup=summary.digest
                            )
                            writers[part.kind] = _StreamWriter(log, (await log.info()).last_seq)
                        for record in part.records:
                            await writers[part.kind].write(record)
                    case FilePart():
                        await asyncio.to_thread(_write_part, folder.root, part)
                    case _:
                        pass
            for writer in writers.values():
                await writer.finish()
            _mark(folder, _Marker(summary.digest, stored=True))
            for kind in ("samples", "dead", "ledger"):  # a coordinator can open the run once its ledger is complete
                await bus.end_restore(getattr(streams, kind))
        finally:
            await bus.close()


class _StreamWriter:
    """Appends the records of one stream with their sequences."""

    def __init__(self, log: StreamLog, last_seq: int) -> None:
        self._log = log
        self._stored = last_seq
        """Last sequence that an interrupted restore has stored."""
        self._last = last_seq
        self._pending: deque[asyncio.Future[int]] = deque()

    async def write(self, record: StreamRecord) -> None:
        if record.seq <= self._stored:
            if record.seq == self._stored and (await self._log.read(record.seq)).msg_id != record.msg_id:
                raise DataLoss(
                    f"{self._log.name}: record {record.seq} is not that of the backup; delete the stream, and restore "
                    "again"
                )
            return
        while self._last < record.seq - 1:  # purged while the backup was written
            await self._append(b"", f"purged-{self._last + 1}", {})
        await self._append(record.payload, record.msg_id, record.headers)

    async def _append(self, payload: bytes, msg_id: str, headers: Mapping[str, str]) -> None:
        future = await self._log.append_pipelined(payload, msg_id=msg_id, expected_last_seq=self._last, headers=headers)
        self._last += 1
        self._pending.append(future)
        if len(self._pending) >= _PENDING_MAX:
            await self._pending.popleft()

    async def finish(self) -> None:
        while self._pending:
            await self._pending.popleft()


def _write_part(root: Path, part: FilePart) -> None:
    target = root / part.path
    with disk_full_errors(root):
        for folder in reversed(Path(part.path).parents):
            (root / folder).mkdir(exist_ok=True, mode=0o700)
        is_private = part.path.startswith(_PRIVATE)
        with open(target, "r+b" if part.offset else "wb", opener=private_opener if is_private else None) as file:
            file.seek(part.offset)
            file.write(part.data)
