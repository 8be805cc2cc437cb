"""The audit of a run that lost its parts on the way, over the real ledger."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.services.coordinator import audit
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.fact_codec import decode_record
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.errors import UnknownRun
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.trainer.checkpoint_files import CheckpointMeta
from rollmesh.trainer.trained_log import TrainedLog
from rollmesh.v1 import run_pb2
from tests.tamper.ledger_copy import read_raw, rechained, store, with_facts

from .coordinator_mesh import MeshParts, coordinator_mesh


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[MeshParts]:
    async with coordinator_mesh(tmp_path) as parts:
        yield parts


async def update(mesh: MeshParts, number: int, log: TrainedLog, *, incarnation: int = 0) -> None:
    """Train update `number` and note it as a trainer does."""
    await mesh.generate(await mesh.acquire(4), step=number - 1, incarnation=incarnation)
    batch = await mesh.lease(number)
    ids = [sample.meta.sample_id for sample in batch.samples]
    digest = (await mesh.commit(number, [batch.lease_id])).digest
    assert log.append(number, ids, incarnation=incarnation, outcome="APPLIED") == digest


def save(log: TrainedLog, folder: Path) -> TrainedLog:
    """Write a checkpoint and return the log that continues it."""
    folder.mkdir(parents=True)
    log.write_to(folder / "trained.jsonl")
    incarnation = int(folder.suffix.removeprefix(".") or 0)
    meta = CheckpointMeta(update=log.update, digest=log.digest, incarnation=incarnation)
    (folder / "rollmesh.json").write_bytes(msgspec.json.encode(meta))
    return TrainedLog(folder / "trained.jsonl", update=log.update, digest=log.digest)


async def test_a_run_with_kills_and_a_roll_back_holds(mesh: MeshParts, tmp_path: Path) -> None:
    await mesh.begin()
    log = TrainedLog()
    await update(mesh, 1, log)
    kept = save(log, tmp_path / "checkpoints/update-00000001.0")
    await mesh.checkpoint(1, kept.digest)
    await mesh.publish(1)
    mesh.nats.kill()
    await mesh.nats.start()
    await update(mesh, 2, log)  # lost with the trainer: no checkpoint holds it
    await mesh.restart_coordinator()
    attached = await mesh.attach(1, kept.digest)
    assert attached.resolution == run_pb2.ATTACH_RESOLUTION_ROLLED_BACK
    assert (attached.incarnation, attached.rolled_back_to, attached.next_update) == (1, 1, 2)
    await mesh.publish(1, incarnation=1)
    batch = await mesh.lease(2)  # the samples of the undone update are back
    kept.append(2, [s.meta.sample_id for s in batch.samples], incarnation=1, outcome="APPLIED")
    assert (await mesh.commit(2, [batch.lease_id])).digest == kept.digest
    save(kept, tmp_path / "checkpoints/update-00000002.1")
    await mesh.checkpoint(2, kept.digest)

    report = await audit_run(mesh.bus, "r", checkpoint=tmp_path / "checkpoints", sample=batch.samples[0].meta.sample_id)
    assert report.holds, report.to_text()
    assert (report.updates, report.updates_undone) == (2, 1)
    assert report.checkpoint is not None
    assert report.checkpoint.digest == report.digest == kept.digest
    state = await mesh.state()
    assert report.samples.trained == state.samples.trained == 8
    assert report.samples.reserved == state.samples.reserved
    history = [line.what for line in report.history]
    assert sum(what.startswith("used by update 2") for what in history) == 2
    assert "update undone by a roll-back to 1: ready again" in history
    assert msgspec.json.encode(report)

    older = await audit_run(mesh.bus, "r", checkpoint=tmp_path / "checkpoints/update-00000001.0")
    assert older.holds, older.to_text()


async def test_weights_trained_on_the_undone_branch_do_not_pass(mesh: MeshParts, tmp_path: Path) -> None:
    await mesh.begin()
    log = TrainedLog()
    await update(mesh, 1, log)
    await mesh.publish(1)
    void = save(log, tmp_path / "void")
    await mesh.attach(0)
    await mesh.publish(0, incarnation=1)
    batch = await mesh.lease(1)
    dropped = [batch.samples[0].meta.sample_id]
    await mesh.commit(1, [batch.lease_id], dropped=dropped)
    report = await audit_run(mesh.bus, "r", checkpoint=tmp_path / "void")
    assert not report.holds
    assert {finding.check for finding in report.findings} == {"checkpoint"}
    assert any(dropped[0] in finding.message for finding in report.findings)
    assert void.update == 1


async def test_a_trainer_that_finished_before_it_could_commit_rolls_forward(mesh: MeshParts, tmp_path: Path) -> None:
    await mesh.begin()
    await mesh.generate(await mesh.acquire(4), step=0)
    batch = await mesh.lease(1)
    log = TrainedLog()
    digest = log.append(1, [s.meta.sample_id for s in batch.samples], incarnation=0, outcome="APPLIED")
    save(log, tmp_path / "c")
    assert (await audit_run(mesh.bus, "r", checkpoint=tmp_path / "c")).holds, "one update ahead, its batch is out"
    attached = await mesh.attach(1, digest)
    assert attached.resolution == run_pb2.ATTACH_RESOLUTION_ROLLED_FORWARD
    assert attached.next_update == 2
    report = await audit_run(mesh.bus, "r", checkpoint=tmp_path / "c")
    assert report.holds, report.to_text()
    assert report.samples.trained == 4


async def test_the_trainer_may_replace_its_checkpoint_while_the_ledger_is_read(
    mesh: MeshParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await mesh.begin()
    log = TrainedLog()
    await update(mesh, 1, log)
    save(log, tmp_path / "update-00000001.0")
    read = audit._read

    async def read_slowly(*args: Any, **options: Any) -> Any:
        for number in (2, 3):  # committed after the end of the ledger that is read
            log.append(number, [f"g{number}.0-0"], incarnation=0, outcome="APPLIED")
        save(log, tmp_path / "update-00000003.0")
        shutil.rmtree(tmp_path / "update-00000001.0")
        return await read(*args, **options)

    monkeypatch.setattr(audit, "_read", read_slowly)
    report = await audit_run(mesh.bus, "r", checkpoint=tmp_path)
    assert report.holds, report.to_text()
    assert report.checkpoint is not None
    assert report.checkpoint.updates == 1


async def test_a_doctored_ledger_on_the_bus_does_not_pass(mesh: MeshParts) -> None:
    """Copies the ledger record by record, and lets the second update use a sample of the first."""
    await mesh.begin()
    log = TrainedLog()
    await update(mesh, 1, log)
    await mesh.publish(1)
    await update(mesh, 2, log)
    records = await read_raw(await mesh.bus.open(run_streams("r").ledger.name))
    stolen = ""
    for number, raw in enumerate(records):
        changed = []
        for fact in decode_record(raw.payload).facts:
            if isinstance(fact, f.UpdateCommitted) and fact.update == 2:
                fact = msgspec.structs.replace(fact, used=(*fact.used[1:], stolen))
            elif isinstance(fact, f.UpdateCommitted):
                stolen = fact.used[0]
            changed.append(fact)
        records[number] = with_facts(raw, changed)
    assert (await audit_run(mesh.bus, "r")).holds
    report = await audit_run(await store(rechained(records)), "r")
    assert {"once", "digest"} <= {finding.check for finding in report.findings}
    assert any(stolen in finding.message for finding in report.findings if finding.check == "once")


async def test_a_run_without_a_ledger_is_unknown() -> None:
    for run in ("nothing", "no/name"):
        with pytest.raises(UnknownRun):
            await audit_run(MemoryBus(), run)
