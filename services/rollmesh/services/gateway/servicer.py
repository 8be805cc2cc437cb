"""Serve RunService to trainers: forward decisions to the coordinator and read payloads from the sample stream.

A forwarded call keeps its deadline, and the caller gets the coordinator's error with its code, reason and details. The
gateway does not need state: any number of gateways can serve, and each may be killed at any time. It stores the head of
the ledger after each commit that it forwards, for the audit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

import grpc

from rollmesh.services.gateway.exports import Exports
from rollmesh.services.gateway.forwarded_calls import ForwardedCalls
from rollmesh.services.gateway.heads import Heads
from rollmesh.services.gateway.payloads import PayloadReader, episodes_of, shard
from rollmesh.shared.domain.ledger_head import EMPTY, LedgerHead
from rollmesh.shared.errors import PayloadLost, field_error
from rollmesh.shared.rpc.handlers import Context
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc, run_pb2_grpc
from rollmesh.v1 import run_pb2 as pb

A = TypeVar("A")


class GatewayServicer(run_pb2_grpc.RunServiceServicer):
    """Serve RunService with a coordinator's stubs and a bus."""

    def __init__(
        self,
        run: run_pb2_grpc.RunServiceAsyncStub,
        coordinator: coordinator_pb2_grpc.CoordinatorServiceAsyncStub,
        payloads: PayloadReader,
        exports: Exports,
        heads: Heads,
        *,
        stream_channel: grpc.aio.Channel,
        streams: ForwardedCalls,
        waits: ForwardedCalls,
        episode_channel: grpc.aio.Channel,
        episodes: ForwardedCalls,
        call_s: float,
    ) -> None:
        """`stream_channel` is the connection of `streams` to the coordinator, and `episode_channel` that of
        `episodes`."""
        self._run = run
        self._run_streams: run_pb2_grpc.RunServiceAsyncStub = run_pb2_grpc.RunServiceStub(stream_channel)
        self._ready_streams: coordinator_pb2_grpc.CoordinatorServiceAsyncStub = (
            coordinator_pb2_grpc.CoordinatorServiceStub(stream_channel)
        )
        self._streams = streams
        self._waits = waits
        self._run_episodes: run_pb2_grpc.RunServiceAsyncStub = run_pb2_grpc.RunServiceStub(episode_channel)
        self._episodes = episodes
        self._coordinator = coordinator
        self._payloads = payloads
        self._exports = exports
        self._heads = heads
        self._call_s = call_s

    async def _forward(
        self, verb: Callable[..., Awaitable[A]], request: Any, context: Context, wait_s: float = 0.0
    ) -> A:
        """Forward a call. A failed call raises AioRpcError, which the error interceptor returns unchanged."""
        remaining_s = context.time_remaining()
        return await verb(request, timeout=wait_s + self._call_s if remaining_s is None else remaining_s)

    async def CreateRun(self, request: pb.CreateRunRequest, context: Context) -> pb.CreateRunResponse:
        return await self._forward(self._run.CreateRun, request, context)

    async def ChangeRun(self, request: pb.ChangeRunRequest, context: Context) -> pb.ChangeRunResponse:
        return await self._forward(self._run.ChangeRun, request, context)

    async def AttachTrainer(self, request: pb.AttachTrainerRequest, context: Context) -> pb.AttachTrainerResponse:
        return await self._forward(self._run.AttachTrainer, request, context)

    async def LeaseBatch(self, request: pb.LeaseBatchRequest, context: Context) -> pb.LeaseBatchResponse:
        with self._waits.one() if request.wait_s > 0 else nullcontext():
            return await self._forward(self._run.LeaseBatch, request, context, request.wait_s)

    async def RenewBatch(self, request: pb.RenewBatchRequest, context: Context) -> pb.RenewBatchResponse:
        return await self._forward(self._run.RenewBatch, request, context)

    async def CommitUpdate(self, request: pb.CommitUpdateRequest, context: Context) -> pb.CommitUpdateResponse:
        response = await self._forward(self._run.CommitUpdate, request, context)
        self._heads.store(request.run, LedgerHead(position=response.ledger_position, hash=response.ledger_hash))
        return response

    async def ReleaseBatch(self, request: pb.ReleaseBatchRequest, context: Context) -> pb.ReleaseBatchResponse:
        return await self._forward(self._run.ReleaseBatch, request, context)

    async def ReportCheckpoint(
        self, request: pb.ReportCheckpointRequest, context: Context
    ) -> pb.ReportCheckpointResponse:
        return await self._forward(self._run.ReportCheckpoint, request, context)

    async def PublishVersion(self, request: pb.PublishVersionRequest, context: Context) -> pb.PublishVersionResponse:
        return await self._forward(self._run.PublishVersion, request, context)

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        return await self._forward(self._run.GetRun, request, context)

    async def StopRun(self, request: pb.StopRunRequest, context: Context) -> pb.StopRunResponse:
        return await self._forward(self._run.StopRun, request, context)

    async def DeleteRun(self, request: pb.DeleteRunRequest, context: Context) -> pb.DeleteRunResponse:
        response = await self._forward(self._run.DeleteRun, request, context)
        self._heads.store(request.run, EMPTY)
        return response

    async def ListDead(self, request: pb.ListDeadRequest, context: Context) -> pb.ListDeadResponse:
        return await self._forward(self._run.ListDead, request, context)

    async def ReplayDead(self, request: pb.ReplayDeadRequest, context: Context) -> pb.ReplayDeadResponse:
        return await self._forward(self._run.ReplayDead, request, context)

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> AsyncIterator[pb.WatchRunResponse]:
        with self._streams.one():
            call = self._run_streams.WatchRun(request, timeout=context.time_remaining())
            try:
                async for news in call:
                    yield news
            finally:
                call.cancel()

    async def FetchSamples(
        self, request: pb.FetchSamplesRequest, context: Context
    ) -> AsyncIterator[pb.FetchSamplesResponse]:
        num_shards = request.num_shards or 1
        if not 0 <= request.shard_index < num_shards:
            raise field_error("shard_index", f"be in [0, num_shards = {num_shards})", request.shard_index)
        ask = coordinator_pb2.GetBatchRequest(
            run=request.run,
            trainer_epoch=request.trainer_epoch,
            lease_id=request.lease_id,
            sample_ids=request.sample_ids,
        )
        batch = await self._forward(self._coordinator.GetBatch, ask, context)
        chosen = shard(episodes_of(batch.samples), request.shard_index, num_shards)
        async for response in self._payloads.read(request.run, chosen):
            yield response

    async def PrefetchSamples(
        self, request: pb.PrefetchSamplesRequest, context: Context
    ) -> AsyncIterator[pb.PrefetchSamplesResponse]:
        geometry = request.geometry if request.HasField("geometry") else None
        ask = coordinator_pb2.WatchReadyRequest(
            run=request.run,
            policy=request.policy,
            learner=request.learner,
            trainer_epoch=request.trainer_epoch,
            geometry=geometry,
        )
        with self._streams.one():
            call = self._ready_streams.WatchReady(ask, timeout=context.time_remaining())
            try:
                async for ready in call:
                    with suppress(PayloadLost):  # FetchSamples of the lease reports it
                        async for found in self._payloads.read(request.run, episodes_of(ready.samples)):
                            if not found.HasField("failure"):
                                yield pb.PrefetchSamplesResponse(episode=found.episode, sample_ids=found.sample_ids)
            finally:
                call.cancel()

    async def SubmitTasks(self, request: pb.SubmitTasksRequest, context: Context) -> pb.SubmitTasksResponse:
        return await self._forward(self._run.SubmitTasks, request, context)

    async def OpenEpisode(self, request: pb.OpenEpisodeRequest, context: Context) -> pb.OpenEpisodeResponse:
        with self._episodes.one():
            return await self._forward(self._run_episodes.OpenEpisode, request, context, request.wait_s)

    async def FinishEpisode(self, request: pb.FinishEpisodeRequest, context: Context) -> pb.FinishEpisodeResponse:
        with self._episodes.one():
            return await self._forward(self._run_episodes.FinishEpisode, request, context)

    async def SubmitSamples(self, request: pb.SubmitSamplesRequest, context: Context) -> pb.SubmitSamplesResponse:
        return await self._forward(self._run.SubmitSamples, request, context)

    async def StreamSamples(
        self, request: pb.StreamSamplesRequest, context: Context
    ) -> AsyncIterator[pb.StreamSamplesResponse]:
        async for response in self._exports.stream(request.run, request.cursor):
            yield response
