"""`rollmesh audit RUN`: proofs from a run folder's ledger, with a nats-server of its own over that folder's store.

Collaborators: `coordinator.audit` (the proofs). Nothing but the server's own files is written.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from rollmesh.services.cli.config import TrainConfig, load_train_config
from rollmesh.services.cli.run_folder import RunFolder
from rollmesh.services.coordinator.audit import AuditReport, audit_run
from rollmesh.services.mesh.place import open_place
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.errors import ConfigError


def audit_folder(
    root: Path, *, checkpoint: Path | None = None, sample: str = "", as_json: bool = False
) -> tuple[bool, str]:
    """(whether every claim holds, the report as text or JSON).

    The trainer's own list is taken from `checkpoint`, by default from the newest one of the run.
    Raises ConfigError if `root` is no run's folder, BusUnavailable if the run is running.
    """
    folder = RunFolder(root.resolve())
    folder.read_origin()
    config = load_train_config(folder.config)
    found = asyncio.run(_audit(folder, config, _checkpoint(folder, checkpoint), sample))
    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if as_json else found.to_text()
    return found.holds, text


def _checkpoint(folder: RunFolder, named: Path | None) -> Path | None:
    if named is None:
        return folder.newest_checkpoint()
    if not named.is_dir():
        raise ConfigError(
            f"--checkpoint {named}: there is no such folder; name one below {folder.root / 'checkpoints'}"
        )
    return named


async def _audit(folder: RunFolder, config: TrainConfig, checkpoint: Path | None, sample: str) -> AuditReport:
    if not (folder.root / "addresses.json").exists():
        raise ConfigError(
            f"{folder.root}: the run was never started, there is no ledger; start it with `rollmesh train`"
        )
    place = open_place(config, run_dir=folder.root, base_dir=Path(folder.read_origin().base_dir))
    if config.bus.url:
        bus = await JetStreamBus.connect(config.bus.url, login=place.bus_login())
        return await _over(bus, config, checkpoint, sample)
    async with place.bus_server() as server:
        bus = await JetStreamBus.connect(server.url, login=place.bus_login())
        return await _over(bus, config, checkpoint, sample)


async def _over(bus: Bus, config: TrainConfig, checkpoint: Path | None, sample: str) -> AuditReport:
    try:
        return await audit_run(bus, config.run.name, checkpoint=checkpoint, sample=sample)
    finally:
        await bus.close()
