"""`rollmesh up`: a mesh without a run, for trainers that come over the gateway; `status` and `drain` by its folder."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.coordinator.fact_codec import encode
from rollmesh.services.learner.config import FAKE_TRAINER, LearnerConfig
from rollmesh.services.learner.node import LearnerNode
from rollmesh.services.mesh.config import RunConfig
from rollmesh.services.mesh.security import read_token
from rollmesh.shared.clients.trainer import RunAddress
from rollmesh.shared.config import to_yaml
from rollmesh.shared.errors import InvalidInput, MeshBusy
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import events_pb2, run_pb2, run_pb2_grpc

from ..chaos.world import mesh_config, save_model_folder

END_S = 90.0
COMMAND = (sys.executable, "-m", "rollmesh.services.cli")


@asynccontextmanager
async def up(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The command over `folder`, and the gateway's address that it printed."""
    config = mesh_config(save_model_folder(folder / "model"))
    (folder / "mesh.yaml").write_text(to_yaml(config))
    process = await asyncio.create_subprocess_exec(
        *(*COMMAND, "up", str(folder / "mesh.yaml"), "--out", str(folder / "out")), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(END_S):
            while not (line := (await process.stdout.readline()).decode()).startswith("gateway"):
                assert process.returncode is None
        yield process, line.split()[1]
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def rollmesh(*arguments: str) -> str:
    """What the command prints; it succeeds."""
    process = await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(END_S):
        said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


async def create(gateway: str, access: Access, run: str, **fields: Any) -> bool:
    config = RunConfig(name=run, batch_groups=2, group_size=4, eval_every=0, **fields)
    spec = encode(config.spec(), events_pb2.RunSpec)
    async with open_channel(gateway, access=access) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)
        with typed_errors():
            answer = await stub.CreateRun(run_pb2.CreateRunRequest(spec=spec), timeout=30.0)
    return bool(answer.created)


@pytest.mark.timeout(300)
async def test_a_mesh_that_is_up_serves_runs_that_are_created_later_under_names_of_their_own(tmp_path: Path) -> None:
    async with up(tmp_path) as (process, gateway):
        access = Access(read_token(tmp_path / "out/token"))
        with pytest.raises(InvalidInput, match="inference nodes serve 'main'"):
            await create(gateway, access, "theirs", policy="another")
        for run in (
            "first",
            "second",
        ):  # the second begins at step 0 again, on nodes that serve the first one's last step
            assert await create(gateway, access, run, updates_max=3)
            with pytest.raises(MeshBusy, match=f"run {run} is live"):
                await create(gateway, access, "third")
            await train(tmp_path / run, gateway, access, run)
        (first, second) = json.loads(await rollmesh("status", str(tmp_path / "out"), "--json"))["runs"]
        assert [first["run"], second["run"]] == ["first", "second"]
        assert all(int(run["policies"][0]["applied_step"]) == 3 for run in (first, second))
        assert "has left" in await rollmesh("drain", "inference-1", str(tmp_path / "out"), "--wait")
        process.send_signal(signal.SIGINT)
        async with asyncio.timeout(END_S):
            assert await process.wait() == 0


async def train(folder: Path, gateway: str, access: Access, run: str) -> None:
    """The built-in learner, as a stranger to this mesh."""
    config = LearnerConfig(directory=str(folder), engine=FAKE_TRAINER, tensorboard=False)
    async with asyncio.timeout(END_S), LearnerNode(config, RunAddress(address=gateway, access=access, run=run)) as node:
        await node.wait()
