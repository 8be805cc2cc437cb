"""CoordinatorService: nodes join, workers lease episodes and report them, the gateway reads batches."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from rollmesh.services.coordinator import translate, validation
from rollmesh.services.coordinator.answer_keys import AnswerKeys
from rollmesh.services.coordinator.applications import Applications
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.fleet import NodeKind
from rollmesh.services.coordinator.driver import RunDriver
from rollmesh.services.coordinator.fact_codec import decode_request, encode, known_member
from rollmesh.services.coordinator.fleet_keeper import FleetKeeper, NodeStream
from rollmesh.services.coordinator.mesh_description import MeshDescriber
from rollmesh.services.coordinator.metrics import ACQUIRE_SECONDS
from rollmesh.services.coordinator.runs import Runs
from rollmesh.services.coordinator.translate import from_wire, to_wire
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.errors import MeshError, UnknownRun, field_error
from rollmesh.shared.rpc.handlers import Context
from rollmesh.shared.rpc.limits import MESSAGE_BYTES_MAX
from rollmesh.shared.telemetry import tracing
from rollmesh.shared.telemetry.metrics import observe
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import coordinator_pb2_grpc

REPORTS_MAX = 4096
FLEET_BYTES_MAX = MESSAGE_BYTES_MAX // 2
"""Maximum size of the nodes in a response, in bytes."""
READY_INTERVAL_S = 0.05
"""Minimum time between two messages of WatchReady, in seconds: about the latency of a small payload."""


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """The internal service of the mesh."""

    def __init__(
        self,
        runs: Runs,
        keeper: FleetKeeper,
        clock: Clock,
        *,
        deadline_s: float,
        mesh: MeshDescriber,
        answer_keys: AnswerKeys,
        applications: Applications,
    ) -> None:
        """`deadline_s` is the server's limit for a call without a deadline."""
        self._deadline_s = deadline_s
        self._runs = runs
        self._keeper = keeper
        self._clock = clock
        self._mesh = mesh
        self._answer_keys = answer_keys
        self._applications = applications

    async def Join(self, requests: AsyncIterator[pb.JoinRequest], context: Context) -> AsyncIterator[pb.JoinResponse]:
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("hello"):
            raise field_error("hello", "be set in the first message", None)
        stream = self._keeper.join(first.hello)
        reader = asyncio.create_task(self._read(stream, requests))
        try:
            async for message in stream.messages():
                yield message
        finally:
            self._keeper.leave(stream)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, stream: NodeStream, requests: AsyncIterator[pb.JoinRequest]) -> None:
        """Handle a node's reports until it disconnects or one is rejected. Both end the stream."""
        try:
            async for request in requests:
                if not request.HasField("report"):
                    raise field_error("report", "be set in every message after the hello", None)
                self._keeper.report(stream, request.report)
        except MeshError as error:
            stream.end(error)
        else:
            stream.end()

    async def AcquireRollouts(self, request: pb.AcquireRolloutsRequest, context: Context) -> pb.AcquireRolloutsResponse:
        if not 1 <= request.num_max <= translate.NUM_MAX:
            raise field_error("num_max", f"be in [1, {translate.NUM_MAX}]", request.num_max)
        wait_s = translate.wait_s(request.wait_s, context.time_remaining() or self._deadline_s)
        until_s = self._clock.monotonic_s() + wait_s
        while True:
            changed = self._runs.changed
            runs = await self._live_runs(request.node_id)
            left_s = max(0.0, until_s - self._clock.monotonic_s())
            response = await self._first_of(runs, request, left_s, changed)
            if response.leases or self._clock.monotonic_s() >= until_s:
                return response

    async def _live_runs(self, node_id: str) -> list[RunDriver]:
        """Return the live runs of a node: those that it named, or all."""
        named = self._keeper.check_may_work(node_id)
        for run in named:
            if run not in self._runs.drivers and run not in self._runs.ended:
                with contextlib.suppress(UnknownRun):  # not created yet
                    await self._runs.get(run)
        return [driver for driver in self._runs.live if not named or driver.run in named]

    async def _first_of(
        self, runs: list[RunDriver], request: pb.AcquireRolloutsRequest, wait_s: float, changed: asyncio.Event
    ) -> pb.AcquireRolloutsResponse:
        """Return the work of the first run that has any. Returns no work after `wait_s`, and when `changed` is set."""
        asking = {asyncio.create_task(self._acquire(driver, request, wait_s)): driver for driver in runs}
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(changed.wait())]
        if not asking:
            ends.append(asyncio.create_task(self._clock.sleep(wait_s)))
        waiting_for = "a run"
        try:
            while True:
                done, _ = await asyncio.wait([*asking, *ends], return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in asking if task in done]:
                    acquired, driver = task.result(), asking.pop(task)
                    if acquired.leases:
                        return _acquired(driver.run, acquired)
                    waiting_for = acquired.waiting_for
                if not asking or any(end in done for end in ends):
                    return pb.AcquireRolloutsResponse(waiting_for=waiting_for)
        finally:
            for task in (*asking, *ends):
                task.cancel()
            await asyncio.gather(*asking, *ends, return_exceptions=True)
            for task, driver in asking.items():
                if not task.cancelled() and task.exception() is None:
                    driver.return_leases(task.result())

    async def _acquire(self, driver: RunDriver, request: pb.AcquireRolloutsRequest, wait_s: float) -> i.Acquired:
        asked_s = self._clock.monotonic_s()
        acquired = await driver.submit(
            lambda ticket: i.AcquireRollouts(
                ticket=ticket,
                node_id=request.node_id,
                num_max=request.num_max,
                wait_s=wait_s,
                reads_variants=self._keeper.reads_variants(request.node_id),
            )
        )
        observe(ACQUIRE_SECONDS, self._clock.monotonic_s() - asked_s, driver.run)
        return acquired

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Context) -> pb.RenewLeasesResponse:
        validation.check_renew(request)
        by_run: dict[str, list[str]] = {}
        for name in request.lease_ids:
            run, lease_id = from_wire(name)
            by_run.setdefault(run, []).append(lease_id)
        gone: list[str] = []
        lease_s = 0.0
        for run, lease_ids in by_run.items():
            try:
                renewed = await self._renew(await self._runs.get(run), request.node_id, tuple(lease_ids))
            except UnknownRun:
                gone += [to_wire(run, lease_id) for lease_id in lease_ids]
                continue
            gone += [to_wire(run, lease_id) for lease_id in renewed.gone]
            lease_s = min(lease_s, renewed.lease_s) if lease_s else renewed.lease_s
        return pb.RenewLeasesResponse(gone=gone, lease_s=lease_s)

    async def _renew(self, driver: RunDriver, node_id: str, lease_ids: tuple[str, ...]) -> m.RenewLeasesResponse:
        renewed = await driver.submit(lambda ticket: m.RenewLeases(ticket=ticket, node_id=node_id, lease_ids=lease_ids))
        return renewed

    async def ReportEpisodes(self, request: pb.ReportEpisodesRequest, context: Context) -> pb.ReportEpisodesResponse:
        validation.check_id("node_id", request.node_id)
        if len(request.reports) > REPORTS_MAX:
            raise field_error("reports", f"have at most {REPORTS_MAX} entries", len(request.reports))
        results = [""] * len(request.reports)
        places: dict[str, list[int]] = {}
        for index, report in enumerate(request.reports):
            places.setdefault(report.key.run, []).append(index)
        for run, indices in places.items():
            reports = tuple(translate.episode_report(request.reports[index]) for index in indices)
            with tracing.spans_below(
                (request.reports[index].traceparent for index in indices), "record", "coordinator"
            ):
                answers = await self._report(run, request.node_id, reports)
            for index, result in zip(indices, answers, strict=True):
                results[index] = result
        return pb.ReportEpisodesResponse(results=results)

    async def _report(self, run: str, node_id: str, reports: tuple[i.EpisodeReport, ...]) -> tuple[str, ...]:
        try:
            driver = await self._runs.get(run)
        except UnknownRun:
            return ("UNKNOWN_LEASE",) * len(reports)
        reported = await driver.submit(lambda ticket: i.ReportEpisodes(ticket=ticket, node_id=node_id, reports=reports))
        return reported.results

    async def ServeEpisode(self, request: pb.ServeEpisodeRequest, context: Context) -> pb.ServeEpisodeResponse:
        validation.check_id("node_id", request.node_id)
        for field in ("base_url", "api_key", "model"):
            validation.check_text(f"served.{field}", getattr(request.served, field))
        run, lease_id = from_wire(request.lease_id)
        wait_s = translate.wait_s(request.wait_s, context.time_remaining() or self._deadline_s)
        return await self._applications.serve(await self._runs.get(run), lease_id, request, wait_s)

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self._keeper.drain(request.node_id)
        return pb.DrainResponse()

    async def GetFleet(self, request: pb.GetFleetRequest, context: Context) -> pb.GetFleetResponse:
        nodes = self._keeper.nodes(known_member(NodeKind, request.kind))
        fitting = translate.pieces(sorted(nodes, key=lambda node: node.state == pb.NODE_STATE_DEAD), FLEET_BYTES_MAX)[0]
        fitting.sort(key=lambda node: node.node_id)
        return pb.GetFleetResponse(nodes=fitting, num_omitted=len(nodes) - len(fitting))

    async def GetAnswerKeys(self, request: pb.GetAnswerKeysRequest, context: Context) -> pb.GetAnswerKeysResponse:
        return pb.GetAnswerKeysResponse(answer_keys=await self._answer_keys.find(request.oracle_refs))

    async def GetMesh(self, request: pb.GetMeshRequest, context: Context) -> pb.GetMeshResponse:
        return await self._mesh.describe()

    async def FetchModelFiles(
        self, request: pb.FetchModelFilesRequest, context: Context
    ) -> AsyncIterator[pb.FetchModelFilesResponse]:
        async for piece in self._mesh.model_files(request):
            yield piece

    async def GetBatch(self, request: pb.GetBatchRequest, context: Context) -> pb.GetBatchResponse:
        validation.check_run(request.run)
        validation.check_epoch(request)
        validation.check_id("lease_id", request.lease_id)
        driver = await self._runs.get(request.run)
        reply = await driver.submit(lambda ticket: decode_request(m.GetBatch, ticket, request))
        return encode(reply, pb.GetBatchResponse)

    async def WatchReady(self, request: pb.WatchReadyRequest, context: Context) -> AsyncIterator[pb.WatchReadyResponse]:
        validation.check_trainer(request)
        asked, known = translate.watch_ready(request), set[str]()
        driver = await self._runs.get(request.run)

        def read(core: Core, _: LedgerHead) -> tuple[m.LeasedSample, ...]:
            return core.ready_ahead(asked, known)

        async for samples in driver.watch(read, interval_s=READY_INTERVAL_S):
            for piece in translate.pieces(translate.leased_samples(samples)) if samples else ():
                yield pb.WatchReadyResponse(samples=piece)


def _acquired(run: str, acquired: i.Acquired) -> pb.AcquireRolloutsResponse:
    leases: list[Any] = [translate.episode_lease(run, lease) for lease in acquired.leases]
    return pb.AcquireRolloutsResponse(leases=leases, waiting_for=acquired.waiting_for)
