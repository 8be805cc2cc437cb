"""Services of a run in a separate process: `python -m rollmesh.mesh`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from rollmesh.app.certificates import make_certificates
from rollmesh.mesh.config import MeshConfig
from rollmesh.mesh.mesh_services import NATS, service_names
from rollmesh.mesh.process_events import STOPPED
from rollmesh.mesh.run_layout import open_layout
from rollmesh.mesh.security import NetworkConfig, SecurityConfig
from rollmesh.shared.config.loader import to_yaml
from rollmesh.trainer.trained_log import read_trained

from ..chaos.world import World, mesh_config, save_model_folder

END_S = 60.0
REJECTING = """
from rollmesh.shared.weights.model_folder import check_positions
from rollmesh.testing.fake_engine import FakeEngine

class Rejecting(FakeEngine):
    async def start(self):
        key = "inference.engine.options.context_max"
        check_positions({"max_position_embeddings": 128}, self.context_max, model="model", key=key)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MeshConfig:
    """A run that finishes on request."""
    model = save_model_folder(tmp_path_factory.mktemp("model"))
    return mesh_config(model, batch_groups=4, group_size=4, updates_max=0)


@asynccontextmanager
async def host(
    folder: Path, config: MeshConfig, services: Sequence[str], *overrides: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The command, killed at the end if it is still there."""
    (folder / "config.yaml").write_text(to_yaml(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "rollmesh.mesh", "--run-dir", str(folder / "run")),
        *("--config", str(folder / "config.yaml"), "--services", ",".join(services), *overrides),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    """Exit code and what it said."""
    async with asyncio.timeout(END_S):
        _, said = await process.communicate()
    return process.returncode, said.decode()


def look(folder: Path, config: MeshConfig) -> World:
    """The run from outside."""
    layout = open_layout(config, run_dir=folder / "run", base_dir=folder)
    return World(layout=layout)


async def test_a_host_asked_to_stop_leaves_the_last_update_in_a_checkpoint(tmp_path: Path, made: MeshConfig) -> None:
    async with host(tmp_path, made, [NATS, *service_names(made)]) as process:
        run = look(tmp_path, made)
        state = await run.until_state("two updates", lambda s: s.policies[0].applied_step >= 2, limit_s=END_S)
        (ports,) = run.layout.folder(NATS).glob("nats-server_*.ports")
        process.send_signal(signal.SIGTERM)
        code, said = await ended(process)
        assert (code, "error" in said) == (STOPPED, False), said
    newest = max((tmp_path / "run/checkpoints").iterdir())
    assert len(list(read_trained(newest / "trained.jsonl"))) >= state.policies[0].applied_step
    with pytest.raises(ProcessLookupError):
        os.kill(int(ports.stem.rpartition("_")[2]), 0)


async def test_hosts_with_certificates_that_listen_everywhere_train_over_the_advertised_name(
    tmp_path: Path, made: MeshConfig
) -> None:
    files = make_certificates(tmp_path / "tls")
    exposed = msgspec.structs.replace(
        made,
        security=SecurityConfig(ca=files.ca, certificate=files.certificate, key=files.key, token_file=files.token_file),
        network=NetworkConfig(host="0.0.0.0", advertise="localhost"),
    )
    workers = [name for name in service_names(exposed) if name.startswith(("rollout", "data"))]
    others = [NATS, *(name for name in service_names(exposed) if name not in workers)]
    async with host(tmp_path, exposed, others), host(tmp_path, exposed, workers):
        run = look(tmp_path, exposed)
        await run.until_state("an update", lambda s: s.policies[0].applied_step >= 1, limit_s=END_S)
        assert {address.rpartition(":")[0] for node in await run.fleet() if (address := node.address)} == {"localhost"}
        assert run.layout.bus_server().known_url().startswith("tls://localhost:")


async def test_a_host_ends_with_its_nats_server(tmp_path: Path, made: MeshConfig) -> None:
    async with host(tmp_path, made, [NATS, "coordinator"]) as process:
        run = look(tmp_path, made)
        await run.until("the server runs", lambda: (run.layout.folder(NATS) / "port").exists(), limit_s=END_S)
        assert not await run.fleet()  # the coordinator answers, so it has a bus
        run.kill_nats_server()
        code, said = await ended(process)
    assert code == 1
    assert "error: nats,coordinator failed: nats-server" in said, said


@pytest.mark.parametrize(
    ("services", "overrides", "code", "message"),
    [
        (["rollout-7"], [], 2, "--services must name services of this config (nats, coordinator"),
        ([], [], 2, "--services must name at least one of nats, coordinator"),
        (
            [NATS],
            ["bus.url=tls://elsewhere:4222"],
            2,
            "--services must not include nats, because bus.url is tls://elsewhere:4222",
        ),
        (["rollout-0"], ["bus.embedded.start_s=0.2"], 1, "within 0.2 s; host the service `nats`, or set bus.url"),
    ],
)
async def test_a_host_that_cannot_work_says_why(
    tmp_path: Path, made: MeshConfig, services: list[str], overrides: list[str], code: int, message: str
) -> None:
    async with host(tmp_path, made, services, *overrides) as process:
        found, said = await ended(process)
    assert found == code
    assert message in said
    assert said.count("\n") == 1, said


async def test_a_model_that_the_engine_rejects_ends_the_node_as_a_configuration_error(
    tmp_path: Path, made: MeshConfig
) -> None:
    """The engine rejects it at its start, as those do that run a model, and needs no torch."""
    (tmp_path / "own.py").write_text(REJECTING)
    override = f"inference.engine={{name: '{tmp_path}/own.py:Rejecting', options: {{context_max: 999}}}}"
    async with host(tmp_path, made, [NATS, "inference-0"], override) as process:
        code, said = await ended(process)
    assert code == 2
    assert "error: `inference.engine.options.context_max`: 999 is beyond the 128 positions" in said


def test_hosts_that_start_together_agree_on_token_and_addresses(tmp_path: Path, made: MeshConfig) -> None:
    with ThreadPoolExecutor(8) as pool:
        places = list(
            pool.map(lambda _: open_layout(made, run_dir=tmp_path / "run", base_dir=tmp_path), range(8), timeout=END_S)
        )
    assert all(layout == places[0] for layout in places)
    assert len(places[0].access.token) >= 32
    assert (tmp_path / "run/token").stat().st_mode & 0o777 == 0o600
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"token", "addresses.json"}
