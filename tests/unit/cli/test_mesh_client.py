"""Errors of the commands that call a running mesh: they name the runs, the nodes, and how to restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.app.mesh_client import FleetClient, MeshAddress, call_mesh
from rollmesh.app.run_folder import RunFolder, origin_now
from rollmesh.shared.errors import Unavailable, UnknownNode, UnknownRun
from rollmesh.shared.net.ports import lasting_ports
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, run_pb2, run_pb2_grpc

ACCESS = Access(token="secret")


class MeshOfTwoRuns(run_pb2_grpc.RunServiceServicer, coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Lists runs `b` and `a`, of which `a` can be stopped. It has no node."""

    def __init__(self) -> None:
        self.ended = ""

    async def GetMesh(self, request: Any, context: Any) -> coordinator_pb2.GetMeshResponse:
        return coordinator_pb2.GetMeshResponse(runs=[coordinator_pb2.MeshRun(run=run) for run in ("b", "a")])

    async def StopRun(self, request: run_pb2.StopRunRequest, context: Any) -> run_pb2.StopRunResponse:
        if request.run != "a":
            raise UnknownRun("there is no such run; CreateRun first")
        self.ended = f"STOPPED: {request.reason}"
        return run_pb2.StopRunResponse()

    async def GetRun(self, request: run_pb2.GetRunRequest, context: Any) -> run_pb2.GetRunResponse:
        return run_pb2.GetRunResponse(state=run_pb2.RunState(run=request.run, ended=self.ended))

    async def DeleteRun(self, request: run_pb2.DeleteRunRequest, context: Any) -> run_pb2.DeleteRunResponse:
        raise UnknownRun("there is no such run")

    async def Drain(self, request: Any, context: Any) -> coordinator_pb2.DrainResponse:
        raise UnknownNode("join first")


async def test_stop_returns_the_reason_of_the_end_and_unknown_names_are_explained() -> None:
    async with RpcServer(ServerConfig(stop_s=0.0), access=ACCESS) as server:
        servicer = MeshOfTwoRuns()  # type: ignore[abstract]
        server.add(run_pb2_grpc.add_RunServiceServicer_to_server, servicer)
        server.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, servicer)
        await server.start()
        async with FleetClient(MeshAddress(address=server.address, access=ACCESS)) as client:
            assert await client.stop("a", "tired") == "STOPPED: tired"
            for call in (client.stop, client.delete):
                with pytest.raises(UnknownRun, match=r"^there is no run 'c'; runs of this mesh: a, b$"):
                    await call("c")
            with pytest.raises(UnknownNode, match="no node 'x'; `rollmesh status` lists the nodes"):
                await client.drain("x")


@pytest.mark.parametrize(("is_mesh", "remedy"), [(True, "`rollmesh up {}` restarts"), (False, "`rollmesh train {}`")])
def test_a_stopped_mesh_names_the_command_that_restarts_it(tmp_path: Path, is_mesh: bool, remedy: str) -> None:
    RunFolder(tmp_path).origin.write_bytes(msgspec.json.encode(origin_now(["x"], tmp_path, is_mesh=is_mesh)))
    address = f"127.0.0.1:{lasting_ports(1)[0]}"
    with pytest.raises(Unavailable, match=remedy.format(tmp_path)):
        call_mesh(MeshAddress(address=address, access=ACCESS, run=tmp_path), lambda client: client.status())
