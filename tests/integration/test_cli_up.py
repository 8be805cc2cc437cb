"""`rollmesh up`: a mesh without a run, for trainers that connect over the gateway; `status` and `drain` with its
folder."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from rollmesh.client import RunAddress
from rollmesh.mesh.config import RunConfig
from rollmesh.mesh.security import read_token
from rollmesh.services.coordinator.fact_codec import encode
from rollmesh.services.learner.config import LearnerConfig
from rollmesh.services.learner.node import LearnerNode
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.errors import InvalidInput, MeshBusy
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import events_pb2, run_pb2, run_pb2_grpc

from ..chaos.world import mesh_config, save_model_folder
from .up_mesh import COMMAND, END_S, audited, rollmesh, up, up_again


async def create(gateway: str, access: Access, run: str, **fields: Any) -> bool:
    config = RunConfig(name=run, batch_groups=2, group_size=4, eval_every=0, **fields)
    spec = encode(config.spec(), events_pb2.RunSpec)
    async with open_channel(gateway, access=access) as channel:
        stub: Any = run_pb2_grpc.RunServiceStub(channel)
        with typed_errors():
            answer = await stub.CreateRun(run_pb2.CreateRunRequest(spec=spec), timeout=30.0)
    return bool(answer.created)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_mesh_that_is_up_serves_runs_that_are_created_later_under_names_of_their_own(tmp_path: Path) -> None:
    config = mesh_config(save_model_folder(tmp_path / "model"))
    async with up(config, tmp_path) as mesh:
        gateway, access = mesh.gateway, Access(read_token(mesh.token_file))
        with pytest.raises(InvalidInput, match="inference nodes serve 'main'"):
            await create(gateway, access, "theirs", policy="another")
        for run in (
            "first",
            "second",
        ):  # the second run starts at step 0, on nodes that serve the last step of the first one
            assert await create(gateway, access, run, updates_max=3)
            with pytest.raises(MeshBusy, match=f"run {run} is live"):
                await create(gateway, access, "third")
            await train(tmp_path / run, gateway, access, run)
        (first, second) = json.loads(await rollmesh("status", str(mesh.folder), "--json"))["runs"]
        assert [first["run"], second["run"]] == ["first", "second"]
        assert all(int(run["policies"][0]["applied_step"]) == 3 for run in (first, second))
        assert await create(gateway, access, "third", updates_max=3)
        stopped = await rollmesh("stop", "third", str(mesh.folder), "--reason", "tired")
        assert stopped == "run third has ended: STOPPED: tired\n"
        assert await create(gateway, access, "fourth", updates_max=3), "the nodes are free again"
        assert "has left" in await rollmesh("drain", "inference-1", str(mesh.folder), "--wait")
        mesh.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(END_S):
            assert await mesh.process.wait() == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_mesh_that_was_stopped_is_restarted_with_its_live_run_and_its_address(tmp_path: Path) -> None:
    config = mesh_config(save_model_folder(tmp_path / "model"))
    async with up(config, tmp_path) as mesh:
        access = Access(read_token(mesh.token_file))
        assert await create(mesh.gateway, access, "mine", updates_max=6)
        settings = LearnerConfig(directory=str(tmp_path / "mine"), engine=Extension("fake"), tensorboard=False)
        async with LearnerNode(settings, RunAddress(address=mesh.gateway, access=access, run="mine")) as node:
            async with asyncio.timeout(END_S):
                while node.progress.update < 3:  # noqa: ASYNC110 (another process trains)
                    await asyncio.sleep(0.05)
    mistaken = await asyncio.create_subprocess_exec(*COMMAND, "train", str(mesh.folder), stderr=asyncio.subprocess.PIPE)
    assert b"restart it with `rollmesh up" in (await mistaken.communicate())[1]
    assert mistaken.returncode == 2
    async with up_again(tmp_path) as again:
        assert again.gateway == mesh.gateway
        await train(tmp_path / "mine", again.gateway, access, "mine")
    report = await audited(mesh.folder, "mine")
    assert report.updates == 6


async def train(folder: Path, gateway: str, access: Access, run: str) -> None:
    """Run the built-in learner as an external trainer of this mesh."""
    config = LearnerConfig(directory=str(folder), engine=Extension("fake"), tensorboard=False)
    async with asyncio.timeout(END_S), LearnerNode(config, RunAddress(address=gateway, access=access, run=run)) as node:
        await node.wait()
