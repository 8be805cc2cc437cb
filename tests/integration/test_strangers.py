"""Trainers that know protos/ alone, as processes beside a mesh without a learner."""

from __future__ import annotations

import asyncio
import fcntl
import re
import shutil
from pathlib import Path

import pytest

from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.mesh import Mesh, MeshConfig
from rollmesh.shared.bus.jetstream_bus import JetStreamBus

from ..chaos.world import mesh_config, save_model_folder
from .stranger_mesh import ROOT, finish, mesh_without_learner, node_trainer, write_spec, write_weights

NODE_TRAINER = ROOT / "examples" / "trainer_node"
NODE_IS_HERE = shutil.which("node") is not None and shutil.which("npm") is not None
INSTALL_S_MAX = 400.0
TRAIN_S_MAX = 150.0


@pytest.fixture
def config(tmp_path: Path) -> MeshConfig:
    """Four groups of four per update, fake model and sandbox engine."""
    return mesh_config(save_model_folder(tmp_path / "model"))


async def install_node_packages() -> None:
    """What package-lock.json names, once; two test processes may come here at a time."""
    with (NODE_TRAINER / "package.json").open() as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        if not (NODE_TRAINER / "node_modules" / ".package-lock.json").is_file():  # npm writes it last
            install = ["npm", "ci", "--no-audit", "--no-fund", "--prefix", NODE_TRAINER]
            done = await finish(install, limit_s=INSTALL_S_MAX)
            assert done.code == 0, done.output


async def audit(mesh: Mesh, run: str) -> None:
    """The ledger of the stranger's run holds."""
    assert mesh.nats is not None
    bus = await JetStreamBus.connect(mesh.nats.url, token=mesh.token)
    try:
        report = await audit_run(bus, run)
    finally:
        await bus.close()
    assert report.holds, report.to_text()
    assert report.updates == 20


@pytest.mark.timeout(600)
@pytest.mark.skipif(not NODE_IS_HERE, reason="needs node and npm")
async def test_a_trainer_in_node_leases_commits_and_publishes_20_updates(tmp_path: Path, config: MeshConfig) -> None:
    await install_node_packages()
    spec = write_spec(tmp_path / "spec.json", run="node", batch_groups=2, group_size=4, updates_max=20, eval_every=0)
    async with mesh_without_learner(config, tmp_path / "mesh") as mesh:
        trainer = node_trainer(mesh, weights=write_weights(tmp_path / "w"), spec=spec, out=tmp_path / "trained")
        done = await finish(trainer, limit_s=TRAIN_S_MAX)
        assert done.code == 0, done.output
        await audit(mesh, "node")
    assert re.findall(r"^update (\d+):", done.output, re.M) == [str(k) for k in range(1, 21)]
