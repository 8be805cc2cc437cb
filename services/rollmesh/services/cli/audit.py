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
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.bus.embedded_server import EmbeddedServer
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
    if config.bus.url:
        return await _over(
            await JetStreamBus.connect(config.bus.url, token=config.bus.token), config, checkpoint, sample
        )
    token = (folder.root / "token").read_text().strip() if (folder.root / "token").exists() else ""
    if not token:
        raise ConfigError(
            f"{folder.root}: the run was never started, there is no ledger; start it with `rollmesh train`"
        )
    async with EmbeddedServer(folder.root / "nats", token=token, config=config.bus.embedded) as server:
        return await _over(await JetStreamBus.connect(server.url, token=token), config, checkpoint, sample)


async def _over(bus: Bus, config: TrainConfig, checkpoint: Path | None, sample: str) -> AuditReport:
    try:
        return await audit_run(bus, config.run.name, checkpoint=checkpoint, sample=sample)
    finally:
        await bus.close()
