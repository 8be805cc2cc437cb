"""A run whose old ledger records move to archive segments while it trains: its coordinator is stopped between the steps
of the archiver, and what reads ledgers gets archived records and those of the stream."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.app.lake.export import export_samples
from rollmesh.mesh import Mesh
from rollmesh.mesh.config import MeshConfig
from rollmesh.services.coordinator.archiver import ArchiveFaultPoint
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.config import ArchiveConfig
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.ledger import read_ledger
from rollmesh.services.gateway.page.history import RunHistory
from rollmesh.services.gateway.page.parts import PageParts
from rollmesh.services.gateway.page.transcripts import Transcripts
from rollmesh.shared.bus.archive_bus import ArchivedLedger, open_ledger
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.v1 import run_pb2

from ..chaos.world import mesh_config, save_model_folder
from .test_mesh import Operator, policy

UPDATES = 12


class StopAt:
    """Wait at each fault point in turn until the coordinator is stopped."""

    def __init__(self) -> None:
        self.left = list(ArchiveFaultPoint)
        self.reached = asyncio.Event()

    async def __call__(self, point: ArchiveFaultPoint) -> None:
        if self.left and point is self.left[0]:
            self.left.pop(0)
            self.reached.set()
            await asyncio.Event().wait()


def config(model: Path, updates_max: int) -> MeshConfig:
    made = mesh_config(model, batch_groups=2, group_size=4, updates_max=updates_max)
    limits = msgspec.structs.replace(made.coordinator.run, snapshot_records=4, housekeeping_s=0.05)
    archive = ArchiveConfig(from_share=1e-5, segment_bytes=1024)
    return msgspec.structs.replace(
        made, coordinator=msgspec.structs.replace(made.coordinator, run=limits, archive=archive)
    )


@pytest.mark.timeout(180)
async def test_a_coordinator_that_is_stopped_while_it_archives_loses_nothing(tmp_path: Path) -> None:
    model, stops = save_model_folder(tmp_path / "tokenizer"), StopAt()
    options: dict[str, Any] = {"coordinator": {"at": stops}}
    async with Mesh(config(model, 10**6), run_dir=tmp_path / "run", options=options) as mesh:
        operator = Operator(mesh)
        while stops.left or stops.reached.is_set():
            async with asyncio.timeout(60):
                await stops.reached.wait()
            stops.reached.clear()
            await mesh.restart("coordinator")
        state = await operator.until(lambda s: True)
        await operator.until(lambda s: policy(s).applied_step > policy(state).applied_step)
    async with Mesh(
        config(model, policy(state).applied_step + UPDATES), run_dir=tmp_path / "run"
    ) as mesh:  # a resumed run
        operator = Operator(mesh)
        await operator.finished()
        state = await operator.until(lambda s: bool(s.ended) and s.samples.live == 0)
        await _check(mesh, state, tmp_path)


async def _check(mesh: Mesh, state: run_pb2.RunState, folder: Path) -> None:
    assert mesh.nats is not None
    bus = mesh.layout.with_payloads(await JetStreamBus.connect(mesh.nats.url, login=BusLogin.of(mesh.access)))
    try:
        ledger = await open_ledger(bus, mesh.run)
        assert isinstance(ledger, ArchivedLedger)
        assert ledger.files is not None
        first_seq = (await ledger.info()).first_seq
        facts = [(record.position, fact) async for record in read_ledger(ledger) for fact in record.facts]
        sealed = [fact for _, fact in facts if isinstance(fact, f.ArchiveSealed)]
        assert len(sealed) == len(ledger.files.segments()) >= 4
        assert [s.first for s in sealed] == [1, *(s.last + 1 for s in sealed[:-1])]
        assert first_seq >= sealed[-1].first, "the run may end before the newest segment is purged"

        scored = [(at, fact) for at, fact in facts if isinstance(fact, f.EpisodeScored)]
        archived = next(fact for at, fact in scored if at <= sealed[-1].last).samples[0].sample_id
        newest = scored[-1][1].samples[0].sample_id
        for sample in (archived, newest):
            report = await audit_run(bus, mesh.run, checkpoint=mesh.layout.run_dir / "checkpoints", sample=sample)
            assert report.holds, report.to_text()
            assert "was admitted" in report.history[0].what
            assert any(line.what.startswith("scored: ") for line in report.history)
            shown = await Transcripts(bus, PageParts()).read(mesh.run, sample, RunHistory())
            assert (shown.sample_id, bool(shown.task)) == (sample, True)

        export = await export_samples(bus, mesh.run, folder / "samples")
        assert export.num_rows == state.samples.reserved + state.eval_samples.reserved
        assert export.num_live == 0
    finally:
        await bus.close()
