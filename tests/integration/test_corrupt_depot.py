"""A depot that serves other bytes than it was asked for is named, and another depot is asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.services.coordinator.core.fleet import NodeKind
from rollmesh.services.coordinator.fleet_keeper import FleetKeeper
from rollmesh.shared.errors import HashMismatch, NotUploaded
from rollmesh.shared.membership.membership import Membership, PassiveHandler
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.v1 import coordinator_pb2, run_pb2, types_pb2, weights_pb2, weights_pb2_grpc

from .coordinator_mesh import ACCESS, DEPOT, JOIN, MeshParts, coordinator_mesh, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
CORRUPT = "a-corrupt-depot"


class AlteredBlobs(weights_pb2_grpc.BlobServiceServicer):
    """Has every blob, and sends other bytes."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.released: list[str] = []

    async def Has(self, request: weights_pb2.HasRequest, context: Any) -> weights_pb2.HasResponse:
        self.num_asked += 1
        return weights_pb2.HasResponse()

    async def Fetch(self, request: weights_pb2.FetchRequest, context: Any) -> AsyncIterator[weights_pb2.FetchResponse]:
        yield weights_pb2.FetchResponse(data=b"other bytes")

    async def Put(
        self, request_iterator: AsyncIterator[weights_pb2.PutRequest], context: Any
    ) -> weights_pb2.PutResponse:
        raise NotImplementedError

    async def ReleaseRun(self, request: weights_pb2.ReleaseRunRequest, context: Any) -> weights_pb2.ReleaseRunResponse:
        self.released.append(request.run)
        return weights_pb2.ReleaseRunResponse()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def altered() -> AlteredBlobs:
    return AlteredBlobs()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory, altered: AlteredBlobs) -> AsyncIterator[MeshParts]:
    async with coordinator_mesh(tmp_path_factory.mktemp("mesh")) as parts:
        server = RpcServer(ServerConfig(stop_s=0.0), access=ACCESS)
        server.add(weights_pb2_grpc.add_BlobServiceServicer_to_server, altered)
        await server.start()
        parts.stack.push_async_callback(server.stop)
        hello = coordinator_pb2.NodeHello(node_id=CORRUPT, kind=DEPOT, address=server.address)
        member = Membership(parts.address, access=ACCESS, handler=PassiveHandler(hello), config=JOIN)
        await parts.stack.enter_async_context(member)
        await member.wait_joined()

        async def both() -> bool:
            return len((await parts.coordinator.GetFleet(coordinator_pb2.GetFleetRequest(kind=DEPOT))).nodes) == 2

        await eventually(both)
        yield parts


async def publish(mesh: MeshParts, digest: str) -> None:
    version = types_pb2.PolicyVersion(policy="main", step=0, weights_digest=digest)
    request = run_pb2.PublishVersionRequest(run=mesh.name, trainer_epoch=mesh.epoch, version=version)
    await mesh.call(mesh.decisions.PublishVersion, request)


async def upload(mesh: MeshParts, monkeypatch: pytest.MonkeyPatch) -> str:
    """Upload to the intact depot."""
    nodes = (await mesh.coordinator.GetFleet(coordinator_pb2.GetFleetRequest(kind=DEPOT))).nodes
    good = next(node for node in nodes if node.node_id != CORRUPT)

    async def one(_: Any) -> coordinator_pb2.GetFleetResponse:
        return coordinator_pb2.GetFleetResponse(nodes=[good])

    class Fleet:
        GetFleet = staticmethod(one)

    with monkeypatch.context() as patch:
        patch.setattr(mesh, "coordinator", Fleet)
        return await mesh.upload(b"weights")


async def test_another_depot_is_asked_and_the_corrupt_one_is_logged(
    mesh: MeshParts, altered: AlteredBlobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await mesh.create()
    await mesh.attach()
    digest = await upload(mesh, monkeypatch)
    for _ in range(4):
        await publish(mesh, digest)
    assert altered.num_asked > 0
    logged = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert logged
    assert all(CORRUPT in line and digest in line for line in logged)
    for _ in range(2):  # both orders of the depots
        with pytest.raises((HashMismatch, NotUploaded)):
            await publish(mesh, "0" * 64)


async def test_a_corrupt_depot_alone_is_named_and_not_the_manifest(
    mesh: MeshParts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = await mesh.another_run("alone")
    await one.create()
    await one.attach()
    addresses = FleetKeeper.addresses
    nodes = (await mesh.coordinator.GetFleet(coordinator_pb2.GetFleetRequest(kind=DEPOT))).nodes
    corrupt = next(node.address for node in nodes if node.node_id == CORRUPT)

    def only_corrupt(self: FleetKeeper, kind: NodeKind, run: str) -> Sequence[str]:
        return [corrupt] if kind is NodeKind.DEPOT else addresses(self, kind, run)

    monkeypatch.setattr(FleetKeeper, "addresses", only_corrupt)
    with pytest.raises(HashMismatch, match=rf"depot {CORRUPT} at {corrupt} .*not the trainer"):
        await publish(one, "0" * 64)


async def test_a_deleted_run_is_released_at_every_depot(mesh: MeshParts, altered: AlteredBlobs) -> None:
    for number in range(2):
        one = await mesh.another_run(f"gone-{number}")
        await one.create()
        await mesh.call(mesh.run.StopRun, run_pb2.StopRunRequest(run=one.name))
        await mesh.call(mesh.run.DeleteRun, run_pb2.DeleteRunRequest(run=one.name))
    assert altered.released == ["gone-0", "gone-1"]
