"""Implement `ports.Coordinator` and `ports.ApplicationPort` over gRPC."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from rollmesh.shared.rpc.status import typed_errors
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, run_pb2


class CoordinatorLink:
    """Call the coordinator for one node. Every call has a deadline and raises typed errors."""

    def __init__(self, channel: grpc.aio.Channel, node_id: str, *, rpc_s_max: float) -> None:
        self._stub: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = coordinator_pb2_grpc.CoordinatorServiceStub(
            channel
        )
        self._node_id = node_id
        self._rpc_s_max = rpc_s_max

    async def acquire(self, num_max: int, wait_s: float) -> coordinator_pb2.AcquireRolloutsResponse:
        request = coordinator_pb2.AcquireRolloutsRequest(node_id=self._node_id, num_max=num_max, wait_s=wait_s)
        with typed_errors():
            return await self._stub.AcquireRollouts(request, timeout=wait_s + self._rpc_s_max)

    async def renew(self, lease_ids: Sequence[str]) -> coordinator_pb2.RenewLeasesResponse:
        request = coordinator_pb2.RenewLeasesRequest(node_id=self._node_id, lease_ids=lease_ids)
        with typed_errors():
            return await self._stub.RenewLeases(request, timeout=self._rpc_s_max)

    async def serve(
        self, lease_id: str, served: run_pb2.OpenEpisodeResponse, wait_s: float
    ) -> coordinator_pb2.ServeEpisodeResponse:
        request = coordinator_pb2.ServeEpisodeRequest(
            node_id=self._node_id, lease_id=lease_id, served=served, wait_s=wait_s
        )
        with typed_errors():
            return await self._stub.ServeEpisode(request, timeout=wait_s + self._rpc_s_max)

    async def report(self, reports: Sequence[coordinator_pb2.EpisodeReport]) -> Sequence[str]:
        request = coordinator_pb2.ReportEpisodesRequest(node_id=self._node_id, reports=reports)
        with typed_errors():
            answer = await self._stub.ReportEpisodes(request, timeout=self._rpc_s_max)
        return answer.results
