"""The coordinator is killed and its folder deleted in mid-run; another one at another address leads the run from its
ledger."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rollmesh.app.nats_files import ALL
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.mesh_services import service_names
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.shared.config.loader import to_yaml
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.net.ports import lasting_ports
from rollmesh.shared.process.process_launch import bound_to_parent
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel

from ..chaos.world import ROOT, mesh_config, save_model_folder
from ..nats_cluster import NatsCluster
from .test_mesh import Operator, policy

HERE, ELSEWHERE = "127.0.0.1", "127.0.0.2"
UPDATES = 8


def config(tmp_path: Path, nats: NatsCluster, coordinator: str, standby: tuple[str, ...]) -> MeshConfig:
    made = mesh_config(
        save_model_folder(tmp_path / "model"), batch_groups=4, group_size=4, updates_max=UPDATES, batch_lease_s=60.0
    )
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("token-of-the-mesh-for-this-test\n")
    server = msgspec.structs.replace(made.coordinator.server, address=coordinator)
    return msgspec.structs.replace(
        made,
        bus=msgspec.structs.replace(made.bus, url=nats.url, login_file=str(nats.logins / ALL)),
        coordinator=msgspec.structs.replace(made.coordinator, server=server, standby=standby),
        security=msgspec.structs.replace(made.security, token_file=str(token)),
    )


@asynccontextmanager
async def coordinator(made: MeshConfig, folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """A coordinator in a process. It is killed with SIGKILL."""
    folder.mkdir(exist_ok=True)  # noqa: ASYNC240 (nothing else runs here)
    file = folder.parent / f"{folder.name}.yaml"
    file.write_text(to_yaml(made))
    command = [
        sys.executable,
        "-m",
        "rollmesh.mesh",
        "--run-dir",
        str(folder),
        "--config",
        str(file),
        "--services",
        "coordinator",
    ]
    process = await asyncio.create_subprocess_exec(*bound_to_parent(command), cwd=ROOT)
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


@pytest.mark.timeout(300)
async def test_a_run_goes_on_with_a_coordinator_on_another_host(tmp_path: Path) -> None:
    port = lasting_ports(1)[0]
    here, elsewhere = f"{HERE}:{port}", f"{ELSEWHERE}:{port}"
    async with NatsCluster(tmp_path / "nats", names=("a",), member=False) as nats:
        made = config(tmp_path, nats, here, (elsewhere,))
        others = [name for name in service_names(made) if name != "coordinator"]
        async with coordinator(made, tmp_path / "first"):
            mesh = Mesh(made, run_dir=tmp_path / "rest", base_dir=tmp_path, services=others)
            await mesh.__aenter__()
            operator = Operator(mesh)
            before = await operator.until(lambda state: policy(state).applied_step >= 3)
        try:
            shutil.rmtree(tmp_path / "first")
            assert policy(before).applied_step < UPDATES
            async with coordinator(config(tmp_path, nats, elsewhere, ()), tmp_path / "second"):
                async with asyncio.timeout(150):
                    await mesh.finished()
                state = await operator.until(lambda state: bool(state.ended) and state.samples.live == 0)
                bus = await nats.connect()
                try:
                    audit = await audit_run(bus, made.run.name, checkpoint=tmp_path / "rest/checkpoints")
                finally:
                    await bus.close()
        finally:
            await mesh.__aexit__(None, None, None)
    assert audit.holds, audit.to_text()
    assert audit.updates == UPDATES
    assert audit.updates_undone == 0, "the learner had its state"
    assert state.ended == "UPDATES_MAX"


def test_a_list_of_addresses_with_a_name_is_rejected() -> None:
    with pytest.raises(ConfigError, match="a list of addresses must contain only IP:PORT, got 'host:1'"):
        open_channel("host:1,127.0.0.1:2", access=Access("token"))
