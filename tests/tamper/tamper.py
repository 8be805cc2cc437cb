"""Make random changes to copies of ledgers, audit each copy, and count what was found by kind."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollmesh.app.samples.stored_heads import head_of_checkpoint
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.audit_chain import StoredHead
from rollmesh.services.coordinator.audit_report import AuditReport
from rollmesh.shared.bus.archive_files import ArchiveFiles
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.testing.memory_bus import MemoryBus
from tests.tamper.archives import archived
from tests.tamper.kinds import ARCHIVES, CHECKPOINTS, CONTRADICTIONS, DAMAGES, FORGERIES, PAYLOADS, Copy, Kind
from tests.tamper.ledger_copy import store
from tests.tamper.real_run import RealRun

KINDS: dict[str, Kind] = {**DAMAGES, **FORGERIES, **CONTRADICTIONS, **PAYLOADS, **CHECKPOINTS, **ARCHIVES}


@dataclass(slots=True)
class Tally:
    """Results of the changes."""

    tried: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    found_alone: Counter[str] = field(default_factory=Counter)
    """Number of FORGERIES that were found without a stored head."""
    missed: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Return one line per kind."""
        lines = ["| tampering | tried | found | found without a stored head |", "| --- | --- | --- | --- |"]
        for kind in KINDS:
            alone = f"{self.found_alone[kind]}" if kind in FORGERIES else "all" if kind not in DAMAGES else ""
            lines.append(f"| {kind} | {self.tried[kind]} | {self.found[kind]} | {alone} |")
        lines.append(f"| all | {self.tried.total()} | {self.found.total()} | |")
        return "\n".join([*lines, *self.missed])


async def untouched(run: RealRun) -> AuditReport:
    """Audit an unchanged copy, with everything it can be compared with."""
    whole = Copy(run.records, checkpoint=run.checkpoint, checkpoint_name=run.checkpoint_name)
    return await _audit(run, whole, heads=True, payloads=True)


async def untouched_archive(run: RealRun) -> AuditReport:
    """Audit an unchanged copy whose older records are in archive segments."""
    return await _audit(run, Copy(run.records, archive=lambda files: None), heads=True, payloads=False)


async def tamper(runs: Sequence[RealRun], *, num: int, seed: int) -> Tally:
    """Make `num` changes, each kind equally often where a run has a record for it."""
    rng, tally = random.Random(seed), Tally()
    names = list(KINDS)
    turn = 0
    while tally.tried.total() < num:
        name = names[turn % len(names)]
        turn += 1
        struck = _strike(name, runs, rng)
        if struck is None:
            continue
        run, copy = struck
        payloads = name in PAYLOADS
        report = await _audit(run, copy, heads=name in DAMAGES or name in FORGERIES, payloads=payloads)
        tally.tried[name] += 1
        tally.found[name] += not report.holds
        if report.holds:
            tally.missed.append(f"missed: {name} in {run.name}, turn {turn}, seed {seed}")
        if name in FORGERIES:
            tally.found_alone[name] += not (await _audit(run, copy, heads=False, payloads=False)).holds
    return tally


def _strike(name: str, runs: Sequence[RealRun], rng: random.Random) -> tuple[RealRun, Copy] | None:
    """Return a change of one kind to any run to which it applies."""
    for run in rng.sample(runs, len(runs)):
        copy = KINDS[name](rng, run)
        if copy is not None and copy != Copy(run.records):
            return run, copy
    return None


async def _audit(run: RealRun, copy: Copy, *, heads: bool, payloads: bool) -> AuditReport:
    if copy.archive is not None:
        with tempfile.TemporaryDirectory(prefix="rollmesh-tamper-") as folder:
            archive = await archived(run.run, copy.records, Path(folder))
            copy.archive(ArchiveFiles(Path(folder) / run.run))
            return await audit_run(archive, run.run, heads=run.heads if heads else [])
    bus = await store(copy.records, run=run.run)
    log = await bus.open(run_streams(run.run).ledger.name)
    for sequence in copy.removed:
        del log._records[sequence]
    if payloads:
        await _store_payloads(bus, run)
    stored = run.heads if heads else []
    if not copy.checkpoint:
        return await audit_run(bus, run.run, heads=stored, payloads=payloads)
    with tempfile.TemporaryDirectory(prefix="rollmesh-tamper-") as folder:
        path = Path(folder) / copy.checkpoint_name
        path.mkdir()
        for name, content in copy.checkpoint.items():
            (path / name).write_bytes(content)
        stored = [*stored, StoredHead(f"checkpoint {path.name}", head_of_checkpoint(path))]
        return await audit_run(bus, run.run, checkpoint=path, heads=stored, payloads=payloads)


async def _store_payloads(bus: MemoryBus, run: RealRun) -> None:
    """Return the sample stream with the same sequences. Purged payloads remain absent."""
    log = await bus.create(run_streams(run.run).samples)
    for sequence in range(1, run.last_payload + 1):
        raw = run.payloads.get(sequence)
        await log.append(raw.payload if raw else b"", msg_id=f"p{sequence}")
    await log.purge_below(min(run.payloads, default=run.last_payload + 1))
