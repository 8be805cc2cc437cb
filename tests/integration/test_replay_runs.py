"""A mesh whose batches are replayed by half: it is stopped, resumed, and audited with its payloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollmesh.app.run_folder import RunFolder
from rollmesh.mesh import Mesh
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.core import facts as f
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.store.payload_files import REPLAY
from rollmesh.trainer.trained_log import read_trained
from tests.chaos.world import mesh_config, save_model_folder

from .coordinator_mesh import eventually
from .test_mesh import Operator, policy

UPDATES = 9
RUN: dict[str, Any] = {
    "batch_groups": 4, "group_size": 2, "max_staleness": 1,
    "replay": {"max_staleness": 4, "share": 0.5, "capacity_groups": 8},
}  # fmt: skip


async def test_a_resumed_run_replays_samples_whose_files_are_removed(tmp_path: Path) -> None:
    model, folder = save_model_folder(tmp_path / "model"), tmp_path / "run"
    copies = folder / "payloads" / "chaos" / REPLAY
    async with Mesh(mesh_config(model, **RUN, updates_max=50), run_dir=folder) as mesh:
        await Operator(mesh).until(lambda state: policy(state).checkpoint_update >= 3 and state.replay.groups > 0)
    async with Mesh(mesh_config(model, **RUN, updates_max=UPDATES), run_dir=folder) as mesh:
        operator = Operator(mesh)
        await operator.finished()

        async def put_away() -> bool:
            return copies.is_dir() and not any(file.stat().st_size for file in copies.parent.glob("*.payloads"))

        await eventually(put_away)
        state = await operator.state()
        facts = await operator.facts()
        assert mesh.nats is not None
        server = await JetStreamBus.connect(mesh.nats.url, login=BusLogin.of(mesh.access))
        bus = mesh.layout.with_payloads(server)
        report = await audit_run(bus, mesh.run, checkpoint=folder / "checkpoints", payloads=True)
        await bus.close()
    assert report.holds, report.to_text()
    assert report.replay is not None
    assert (state.replay.samples.live, state.replay.samples.trained) == (0, report.replay.samples.trained)
    lags = dict(state.replay.trained_by_staleness)
    assert 1 <= min(lags) <= max(lags) <= 4
    assert max(policy(state).trained_by_staleness) <= 1
    newest = RunFolder(folder).newest_checkpoint()
    assert newest is not None
    trained = [name for update in read_trained(newest / "trained.jsonl") for name in update.sample_ids]
    again = {one.sample_id for fact in facts if isinstance(fact, f.SamplesReplayed) for one in fact.samples}
    assert len(again & set(trained)) == report.replay.samples.trained > UPDATES
    assert 0 < len(list(copies.iterdir())) <= 16, "the payloads of the log, and no others"
