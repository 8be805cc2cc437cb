"""No request crashes a process, returns UNKNOWN or INTERNAL, or stops the mesh from working, whatever its bytes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollmesh.mesh import Mesh
from rollmesh.mesh.mesh_services import service_names
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc

from ..chaos.world import mesh_config, save_model_folder
from ..integration.up_mesh import up
from .exercise import exercise, report
from .requests import Sizes

MIB = 1 << 20
GROWTH_MAX = 100 * MIB
SETTLE_S = 60.0
NEARLY_A_MESSAGE = 8_300_000


async def test_every_method_of_every_server_withstands_malformed_requests(tmp_path: Path) -> None:
    """A sixth of the cases; `make suite NAME=garbage` sends all of them, and large ones, to a mesh of processes."""
    config = mesh_config(save_model_folder(tmp_path / "model"))
    services = [name for name in service_names(config) if name != "learner"]
    async with Mesh(config, run_dir=tmp_path / "run", services=services) as mesh:
        finished = asyncio.create_task(mesh.finished())
        sizes = Sizes(oversized=False)
        result = await exercise(mesh.layout.coordinator, mesh.gateway_address, mesh.access, sizes, every=6)
        assert not finished.done()
        finished.cancel()
    assert not result.findings, report(result)


@dataclass(frozen=True)
class Processes:
    """The processes of a mesh, by their services."""

    parent: int

    def resident_bytes(self) -> dict[str, int]:
        """Resident memory by name and process id."""
        page = os.sysconf("SC_PAGE_SIZE")
        found = {}
        for pid in _descendants(self.parent):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--services" in command:
                service = command[command.index(b"--services") + 1].decode()
                found[f"{service} {pid}"] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page
        return found


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [one for child in map(int, children) for one in (child, *_descendants(child))]


@asynccontextmanager
async def mesh_of_processes(folder: Path) -> AsyncIterator[tuple[str, str, Access, Processes]]:
    """Coordinator, gateway, access and processes of a mesh that `rollmesh up` runs."""
    config = mesh_config(save_model_folder(folder / "model"))
    async with up(config, folder) as mesh:
        access = Access((await asyncio.to_thread(mesh.token_file.read_text)).strip())
        async with open_channel(mesh.gateway, access=access) as channel:
            with typed_errors():
                stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
                mesh_view = await stub.GetMesh(coordinator_pb2.GetMeshRequest())
        yield mesh_view.coordinator, mesh.gateway, access, Processes(mesh.process.pid)


@pytest.mark.slow
async def test_large_requests_end_no_process_and_keep_no_memory(tmp_path: Path) -> None:
    async with mesh_of_processes(tmp_path) as (coordinator, gateway, access, processes):
        before = processes.resident_bytes()
        result = await exercise(coordinator, gateway, access, Sizes(text_bytes=NEARLY_A_MESSAGE))
        peak = processes.resident_bytes()
        print(report(result))
        assert not result.findings, report(result)
        assert set(peak) == set(before), "a process has ended"
        until_s = asyncio.get_running_loop().time() + SETTLE_S
        while grown(before, after := processes.resident_bytes()) and until_s > asyncio.get_running_loop().time():  # noqa: ASYNC110
            await asyncio.sleep(1.0)
    for name in before:
        print(f"{name}: {before[name] // MIB} MiB, {peak[name] // MIB} after the walk, {after[name] // MIB} at the end")
    assert not grown(before, after)


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Return the processes whose memory has grown too much."""
    return {name: after[name] - size for name, size in before.items() if after[name] - size > GROWTH_MAX}
