"""`rollmesh scale` on a running mesh of processes: nodes start and leave, no sample is lost, and a resume keeps the
counts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from rollmesh.app.config import load_train_config
from rollmesh.app.run_folder import RunFolder, origin_now
from rollmesh.cli.__main__ import app
from rollmesh.mesh.config import CountsConfig
from rollmesh.mesh.supervisor import Supervisor
from rollmesh.services.coordinator.audit import audit_run
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import run_pb2

from ..chaos.world import World, as_train_config, mesh_config, paced, save_model_folder

LIMIT_S = 120.0
HOSTS: Mapping[str, Sequence[str]] = {
    "nats": ("nats",),
    "services": ("coordinator", "depot", "reward", "data", "sandbox-0", "gateway", "inference-0"),
    "rollout-0": ("rollout-0",),
    "learner": ("learner",),
}
"""Fewer processes than services, because each costs a second of imports."""


def trained(update: int, state: run_pb2.RunState) -> bool:
    return bool(state.policies) and state.policies[0].applied_step >= update


async def scale(*arguments: str, code: int = 0, command: str = "scale") -> str:
    """Run `rollmesh scale ...` and return its output."""
    done = await asyncio.to_thread(CliRunner().invoke, app, [command, *arguments])
    assert done.exit_code == code, done.output
    return done.output


async def until_ready(run: World, *names: str) -> None:
    """Wait until exactly these rollout workers are READY."""
    found: set[str] = set()
    async with asyncio.timeout(LIMIT_S):
        while found != set(names):
            found = {
                node.node_id
                for node in await run.fleet()
                if node.kind == pb.NODE_KIND_ROLLOUT and node.state == pb.NODE_STATE_READY
            }


@pytest.mark.timeout(400)
async def test_workers_start_and_leave_while_the_run_goes_on(tmp_path: Path) -> None:
    config = paced(mesh_config(save_model_folder(tmp_path / "model"), batch_groups=2, group_size=2, updates_max=0))
    config = msgspec.structs.replace(config, counts=CountsConfig(inference=1))
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.write(as_train_config(config), origin_now(["test"], tmp_path))
    at = str(folder.root)
    async with Supervisor(config, run_dir=folder.root, base_dir=tmp_path, hosts=HOSTS) as mesh:
        run = World(layout=mesh.layout)
        state = await run.until_state("an update", partial(trained, 1), limit_s=LIMIT_S)

        said = await scale("rollout=3", at, "--wait")
        assert said.splitlines() == ["rollout-1 is in the mesh", "rollout-2 is in the mesh"]
        await until_ready(run, "rollout-0", "rollout-1", "rollout-2")
        assert {"rollout-1", "rollout-2"} <= set(mesh.pids)
        assert load_train_config(folder.config).counts == CountsConfig(inference=1, rollout=3)
        assert await scale("rollout=3", at) == "nothing to change\n"

        mesh.kill("rollout-2")  # a node that was added is restarted like every other
        later = partial(trained, state.policies[0].applied_step + 3)
        state = await run.until_state("further updates", later, limit_s=LIMIT_S)
        assert "`coordinator` must be one of" in await scale("coordinator=2", at, code=2)
        assert "`inference` must be >= 1, got 0" in await scale("inference=0", at, code=2)

        await scale("rollout-0", at, "--wait", command="drain")
        await until_ready(run, "rollout-1", "rollout-2")
        assert await scale("rollout=3", at, "--wait") == "rollout-0 is in the mesh\n", (
            "it was drained, and counts again"
        )

        said = await scale("rollout=1", at, "--wait")
        assert said.splitlines() == ["rollout-1 has left", "rollout-2 has left"]
        await until_ready(run, "rollout-0")
        await run.until_state("an update", partial(trained, state.policies[0].applied_step + 1), limit_s=LIMIT_S)
        async with asyncio.timeout(LIMIT_S):
            await mesh.stop_learner()
            await mesh.finished()
        ended = await run.until_state("the end", lambda s: True, limit_s=LIMIT_S)
        assert ended.samples.failed == 0
        port = (mesh.layout.folder("nats") / "port").read_text().strip()
        bus = await JetStreamBus.connect(f"nats://127.0.0.1:{port}", login=BusLogin.of(mesh.layout.access))
        try:
            audit = await audit_run(mesh.layout.with_payloads(bus), mesh.layout.run)
        finally:
            await bus.close()
        assert audit.holds, audit.to_text()
    assert "`rollmesh train" in await scale("rollout=2", at, code=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout=2"], "expected KIND=N and the folder of one run"),
        (["RUN"], "expected KIND=N and the folder of one run"),
        (["rollout=2", "rollout=3", "RUN"], "`rollout` is given twice"),
        (["rollout=-1", "RUN"], "`rollout` must be a number of nodes, got '-1'"),
        (["rollout=2", "RUN"], "not the folder of a run"),
    ],
)
def test_a_request_that_makes_no_sense_is_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["scale", *(str(tmp_path) if one == "RUN" else one for one in arguments)])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
