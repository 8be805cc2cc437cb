"""What people and joining nodes ask of the coordinator, answered through the gateway: one public address is enough.

Looking (GetMesh, FetchModelFiles, GetFleet) and Drain are forwarded. Leases, reports and membership are between nodes and the coordinator,
whose address GetMesh tells; a gateway in between would only be one more thing to lose.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NoReturn

from rollmesh.shared.errors import Unimplemented
from rollmesh.shared.rpc.handlers import Context
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import coordinator_pb2_grpc


class CoordinatorFront(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """CoordinatorService over a coordinator's stub, as far as it is public."""

    def __init__(self, coordinator: coordinator_pb2_grpc.CoordinatorServiceAsyncStub, *, call_s: float) -> None:
        self._coordinator: Any = coordinator
        self._call_s = call_s

    def _limit_s(self, context: Context) -> float:
        remaining_s = context.time_remaining()
        return self._call_s if remaining_s is None else remaining_s

    async def GetMesh(self, request: pb.GetMeshRequest, context: Context) -> pb.GetMeshResponse:
        answer: pb.GetMeshResponse = await self._coordinator.GetMesh(request, timeout=self._limit_s(context))
        return answer

    async def FetchModelFiles(
        self, request: pb.FetchModelFilesRequest, context: Context
    ) -> AsyncIterator[pb.FetchModelFilesResponse]:
        call = self._coordinator.FetchModelFiles(request, timeout=context.time_remaining())
        try:
            async for piece in call:
                yield piece
        finally:
            call.cancel()

    async def GetFleet(self, request: pb.GetFleetRequest, context: Context) -> pb.GetFleetResponse:
        answer: pb.GetFleetResponse = await self._coordinator.GetFleet(request, timeout=self._limit_s(context))
        return answer

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        answer: pb.DrainResponse = await self._coordinator.Drain(request, timeout=self._limit_s(context))
        return answer

    async def Join(self, requests: AsyncIterator[pb.JoinRequest], context: Context) -> AsyncIterator[pb.JoinResponse]:
        _refuse("Join")
        yield  # makes it a stream

    async def AcquireRollouts(self, request: pb.AcquireRolloutsRequest, context: Context) -> pb.AcquireRolloutsResponse:
        _refuse("AcquireRollouts")

    async def ExtendGroup(self, request: pb.ExtendGroupRequest, context: Context) -> pb.ExtendGroupResponse:
        _refuse("ExtendGroup")

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Context) -> pb.RenewLeasesResponse:
        _refuse("RenewLeases")

    async def ReportEpisodes(self, request: pb.ReportEpisodesRequest, context: Context) -> pb.ReportEpisodesResponse:
        _refuse("ReportEpisodes")

    async def GetBatch(self, request: pb.GetBatchRequest, context: Context) -> pb.GetBatchResponse:
        _refuse("GetBatch")


def _refuse(verb: str) -> NoReturn:
    raise Unimplemented(f"the gateway does not forward {verb}; ask the coordinator, whose address GetMesh tells")
