"""A mesh of a depot, inference nodes with small engines, and a coordinator of a few lines, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.services.coordinator.fact_codec import encode
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import KvPolicy
from rollmesh.services.inference.node import InferenceNode
from rollmesh.services.weights.config import DepotConfig
from rollmesh.services.weights.node import DepotNode
from rollmesh.shared.codec.trajectory import encode_version
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.protocol import PROTOCOL
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.membership.membership import MembershipConfig
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.shared.weights.manifest import build_manifest, version_owner
from rollmesh.shared.weights.probes import Probe
from rollmesh.shared.weights.transfer import TransferConfig, UploadReport, upload
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc

from ..unit.shared.safetensors_files import write_safetensors
from .content_engine import VOCAB, content_logprobs, content_of

ACCESS = Access(token="test-token")
HERE = Path(__file__).parent
SERVER = ServerConfig(stop_s=0.0)
MEMBERSHIP = MembershipConfig(backoff_s=0.01, backoff_s_max=0.05)
NETWORK = TransferConfig(same_host=False)
FAKE = "fake"

WeightReport = coordinator_pb2.WeightReport
WeightCommand = coordinator_pb2.WeightCommand


class TinyCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Welcomes everyone, passes commands on, records what it receives."""

    def __init__(self, heartbeat_s: float = 60.0) -> None:
        self.hellos: list[coordinator_pb2.NodeHello] = []
        self.reports: list[tuple[str, coordinator_pb2.NodeReport]] = []
        self.fleet = coordinator_pb2.FleetView()
        self.received = asyncio.Condition()
        self._heartbeat_s = heartbeat_s
        self.protocol: coordinator_pb2.ProtocolVersion | None = encode(PROTOCOL, coordinator_pb2.ProtocolVersion)
        self._down: dict[str, asyncio.Queue[coordinator_pb2.JoinResponse | None]] = {}

    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[coordinator_pb2.JoinResponse]:
        hello = (await anext(aiter(request_iterator))).hello
        queue = self._down[hello.node_id] = asyncio.Queue()
        await self._record(hello.node_id, hello)
        welcome = coordinator_pb2.Welcome(heartbeat_s=self._heartbeat_s, coordinator_id="c0", protocol=self.protocol)
        yield coordinator_pb2.JoinResponse(welcome=welcome)
        yield coordinator_pb2.JoinResponse(fleet=self.fleet)
        reader = asyncio.create_task(self._read(hello.node_id, request_iterator, queue))
        try:
            while (message := await queue.get()) is not None:
                yield message
        finally:
            reader.cancel()

    async def _read(self, node_id: str, requests: Any, queue: asyncio.Queue[Any]) -> None:
        async for request in requests:
            await self._record(node_id, request.report)
        queue.put_nowait(None)

    async def _record(self, node_id: str, message: coordinator_pb2.NodeHello | coordinator_pb2.NodeReport) -> None:
        async with self.received:
            if isinstance(message, coordinator_pb2.NodeHello):
                self.hellos.append(message)
            else:
                self.reports.append((node_id, message))
            self.received.notify_all()

    def send(self, node_id: str, message: coordinator_pb2.JoinResponse) -> None:
        self._down[node_id].put_nowait(message)

    def hang_up(self, node_id: str) -> None:
        """Ends a node's stream, as a coordinator that restarts does."""
        self._down[node_id].put_nowait(None)

    def command(
        self,
        node_id: str,
        verb: WeightCommand.Verb.ValueType,
        version: PolicyVersion,
        sources: Sequence[str] = (),
        retain: Sequence[PolicyVersion] = (),
        *,
        activate: bool = False,
    ) -> None:
        command = WeightCommand(
            verb=verb,
            version=encode_version(version),
            sources=sources,
            retain=map(encode_version, retain),
            activate=activate,
        )
        self.send(node_id, coordinator_pb2.JoinResponse(weights=command))

    def weight_reports(self, node_id: str) -> list[WeightReport]:
        return [weights for node, report in self.reports if node == node_id for weights in report.weights]

    def has_hello(self) -> bool:
        return bool(self.hellos)

    def has_reports(self, num: int) -> bool:
        return len(self.reports) == num

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self.received:
            await self.received.wait_for(condition)

    async def outcome(
        self, node_id: str, version: PolicyVersion, *phases: WeightReport.Phase.ValueType
    ) -> WeightReport:
        """The first report about `version` in one of `phases`."""
        wanted = encode_version(version)

        def found() -> list[WeightReport]:
            return [r for r in self.weight_reports(node_id) if r.version == wanted and r.phase in phases]

        await self.until(lambda: bool(found()))
        return found()[0]


@asynccontextmanager
async def coordinator(heartbeat_s: float = 60.0) -> AsyncIterator[tuple[TinyCoordinator, str]]:
    servicer = TinyCoordinator(heartbeat_s)  # type: ignore[abstract]  # Join is all that nodes need
    async with RpcServer(SERVER, access=ACCESS) as server:
        server.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, servicer)
        await server.start()
        yield servicer, server.address


def depot(folder: Path, *, coordinator: str = "", **options: Any) -> DepotNode:
    config = DepotConfig(directory=str(folder / "depot"), server=SERVER, membership=MEMBERSHIP, **options)
    return DepotNode(config, node_id="depot", access=ACCESS, coordinator=coordinator)


def inference(
    folder: Path,
    node_id: str = "inf-0",
    *,
    coordinator: str = "",
    engine: str = FAKE,
    transfer: TransferConfig = NETWORK,
    **engine_options: Any,
) -> InferenceNode:
    """`engine` may be a class of content_engine.py."""
    config = InferenceConfig(
        directory=str(folder / node_id),
        engine=Extension(engine if engine == FAKE else f"content_engine.py:{engine}", engine_options),
        server=SERVER,
        membership=MEMBERSHIP,
        transfer=transfer,
        drain_s=0.0,
    )
    return InferenceNode(config, node_id=node_id, access=ACCESS, coordinator=coordinator, base_dir=HERE)


def small(folder: Path, step: int) -> dict[str, Path]:
    """Return a version of 4 kB. Its file has another name for each step, so that it is not the base of a delta."""
    return {f"{step}.safetensors": write_safetensors(folder / f"{step}.safetensors", step)}


def content_probe(files: dict[str, Path]) -> Probe:
    """Return a probe with the log-probs of `ContentEngine`."""
    tokens = np.arange(12, dtype=np.int32) % VOCAB
    return Probe(token_ids=tokens, logprobs=content_logprobs(content_of(files), tokens))


async def serve(node: InferenceNode, version: PolicyVersion, *sources: str) -> None:
    """Have a node fetch and serve a version."""
    await node.keeper.prepare(version, sources)
    await node.keeper.activate(version, KvPolicy.RECOMPUTE)


async def publish(
    address: str,
    step: int,
    files: dict[str, Path],
    *,
    with_probes: bool = False,
    probe_error: float = 0.0,
    transfer: TransferConfig = NETWORK,
    chunk_bytes: int = 1500,
) -> tuple[PolicyVersion, UploadReport]:
    """Uploads files as a version, as a learner does; probes are right for `ContentEngine`, except for `probe_error`."""
    probes = [content_probe(files)] if with_probes else []
    probes = [replace(probe, logprobs=probe.logprobs - np.float32(probe_error)) for probe in probes]
    built = build_manifest(files, probes=[probe.encode() for probe in probes], chunk_bytes=chunk_bytes)
    version = PolicyVersion(policy="main", step=step, weights_digest=built.weights_digest)
    async with open_channel(address, access=ACCESS) as channel:
        report = await upload(channel, built, owner=version_owner(version), config=transfer)
    return version, report
