"""Forward the public calls of CoordinatorService, so that operators and joining nodes need only the gateway's address.

GetMesh, FetchModelFiles, GetFleet and Drain are forwarded. Nodes send leases, reports and membership directly to the
coordinator, whose address GetMesh returns, because a gateway in between would add a point of failure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc

from rollmesh.services.gateway.forwarded_calls import ForwardedCalls
from rollmesh.shared.errors import Unimplemented
from rollmesh.shared.rpc.handlers import Context
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import coordinator_pb2_grpc


class CoordinatorFront(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Serve the public part of CoordinatorService with a coordinator's stub."""

    def __init__(
        self,
        coordinator: coordinator_pb2_grpc.CoordinatorServiceAsyncStub,
        *,
        stream_channel: grpc.aio.Channel,
        streams: ForwardedCalls,
        call_s: float,
    ) -> None:
        """`stream_channel` is the connection of `streams` to the coordinator."""
        self._coordinator: Any = coordinator
        self._coordinator_streams: Any = coordinator_pb2_grpc.CoordinatorServiceStub(stream_channel)
        self._streams = streams
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
        with self._streams.one():
            call = self._coordinator_streams.FetchModelFiles(request, timeout=context.time_remaining())
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
        yield  # makes this method a generator

    async def AcquireRollouts(self, request: pb.AcquireRolloutsRequest, context: Context) -> pb.AcquireRolloutsResponse:
        _refuse("AcquireRollouts")

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Context) -> pb.RenewLeasesResponse:
        _refuse("RenewLeases")

    async def ReportEpisodes(self, request: pb.ReportEpisodesRequest, context: Context) -> pb.ReportEpisodesResponse:
        _refuse("ReportEpisodes")

    async def ServeEpisode(self, request: pb.ServeEpisodeRequest, context: Context) -> pb.ServeEpisodeResponse:
        _refuse("ServeEpisode")

    async def GetAnswerKeys(self, request: pb.GetAnswerKeysRequest, context: Context) -> pb.GetAnswerKeysResponse:
        _refuse("GetAnswerKeys")

    async def GetBatch(self, request: pb.GetBatchRequest, context: Context) -> pb.GetBatchResponse:
        _refuse("GetBatch")

    async def WatchReady(self, request: pb.WatchReadyRequest, context: Context) -> AsyncIterator[pb.WatchReadyResponse]:
        _refuse("WatchReady")
        yield  # makes this method a generator


def _refuse(verb: str) -> NoReturn:
    raise Unimplemented(f"the gateway does not forward {verb}; call the coordinator, whose address GetMesh returns")
