"""Audit the ledger of a run folder.

Collaborators: `coordinator.audit` (the claims), `run_bus` (the streams of the folder), `stored_heads` (ledger heads
stored elsewhere).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollmesh.app.config import TrainConfig, load_train_config
from rollmesh.app.run_bus import run_bus
from rollmesh.app.run_folder import RunFolder
from rollmesh.app.samples.stored_heads import stored_heads
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.audit_chain import StoredHead
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.shared.bus.run_streams import run_of_ledger
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.errors import ConfigError, UnknownRun


def audit_folder(
    root: Path,
    *,
    checkpoint: Path | None = None,
    heads: Sequence[str] = (),
    payloads: bool = False,
    sample: str = "",
    name: str = "",
    as_json: bool = False,
) -> tuple[bool, str]:
    """Return (whether every claim holds, the report as text or JSON).

    `name`: name of the run, if the mesh served several; by default the configuration's. The trainer's list is read from
    `checkpoint`, by default the newest one of the configuration's run. `heads`: heads of the ledger as POSITION:HASH,
    in addition to those stored in the folder. `payloads`: compare metadata with the payloads that remain in the stream.
    Raise ConfigError if `root` is not a run's folder, InvalidInput for a malformed head, BusUnavailable if its streams
    cannot be read.
    """
    given = [StoredHead("--head", LedgerHead.parse(text)) for text in heads]
    folder = RunFolder(root.resolve())
    folder.read_origin()
    config = load_train_config(folder.config)
    if folder.ledger_was_removed:
        return _stored(folder, as_json=as_json)
    run = name or config.run.name
    path = _checkpoint(folder, checkpoint, own=run == config.run.name)
    known = [*stored_heads(folder, run, path), *given]
    found = asyncio.run(_audit(folder, config, run, path, known, payloads=payloads, sample=sample))
    text = msgspec.json.format(msgspec.json.encode(found), indent=2).decode() if as_json else found.to_text()
    return found.holds, text


def _stored(folder: RunFolder, *, as_json: bool) -> tuple[bool, str]:
    """Return the audit that was written before the ledger was removed."""
    stored = folder.audit.read_bytes()
    try:
        found = msgspec.json.decode(stored, type=AuditReport)
    except UNDECODABLE as err:
        raise ConfigError(f"{folder.audit}: cannot be read as an audit: {err}", path=folder.audit) from err
    note = f"The ledger was removed by `rollmesh clean --for-good`; this audit was made before, see {folder.audit}.\n"
    return found.holds, stored.decode() if as_json else note + found.to_text()


def _checkpoint(folder: RunFolder, named: Path | None, *, own: bool) -> Path | None:
    if named is None:
        return folder.checkpoints if own and folder.newest_checkpoint() else None
    if not named.is_dir():
        problem = (
            "it is not a checkpoint folder of the built-in learner" if named.exists() else "the folder does not exist"
        )
        raise ConfigError(
            f"--checkpoint {named}: {problem}; name one below {folder.root / 'checkpoints'}, or compare a ledger head "
            "with --head POSITION:HASH"
        )
    return named


async def _audit(
    folder: RunFolder,
    config: TrainConfig,
    name: str,
    checkpoint: Path | None,
    heads: Sequence[StoredHead],
    *,
    payloads: bool,
    sample: str,
) -> AuditReport:
    async with run_bus(folder, config) as bus:
        try:
            return await audit_run(bus, name, checkpoint=checkpoint, heads=heads, payloads=payloads, sample=sample)
        except UnknownRun as err:
            runs = sorted(filter(None, map(run_of_ledger, await bus.names())))
            there = f"--run-name takes one of: {', '.join(runs)}" if runs else "no run was created here"
            raise UnknownRun(f"{folder.root}: the ledger of run {name!r} does not exist; {there}", run=name) from err
