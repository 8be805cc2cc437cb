"""`rollmesh audit RUN`: proofs from the ledger of a run folder.

Collaborators: `coordinator.audit` (the proofs), `run_bus` (the folder's streams).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec

from rollmesh.services.cli.config import TrainConfig, load_train_config
from rollmesh.services.cli.run_bus import run_bus
from rollmesh.services.cli.run_folder import RunFolder
from rollmesh.services.coordinator.audit import AuditReport, audit_run
from rollmesh.shared.errors import ConfigError


def audit_folder(
    root: Path, *, checkpoint: Path | None = None, sample: str = "", name: str = "", as_json: bool = False
) -> tuple[bool, str]:
    """(whether every claim holds, the report as text or JSON).

    `name`: which run, where a mesh that was up served several; by default the configuration's. The trainer's own list is taken from `checkpoint`, by default from the newest one of the run.
    Raises ConfigError if `root` is no run's folder, BusUnavailable if its streams cannot be read.
    """
    folder = RunFolder(root.resolve())
    folder.read_origin()
    config = load_train_config(folder.config)
    found = asyncio.run(_audit(folder, config, name or config.run.name, _checkpoint(folder, checkpoint), sample))
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


async def _audit(
    folder: RunFolder, config: TrainConfig, name: str, checkpoint: Path | None, sample: str
) -> AuditReport:
    async with run_bus(folder, config) as bus:
        return await audit_run(bus, name, checkpoint=checkpoint, sample=sample)
