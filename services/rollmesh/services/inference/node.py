"""`InferenceNode`: engine, weights and their servicers.

async with InferenceNode(config, node_id="inf-0", coordinator="127.0.0.1:7000", access=access) as node:
    ...                                 # served at node.address; the node has no weights until it has activated a version
"""  # noqa: E501, W505

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from rollmesh.services.inference.commands import WeightCommands
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import INFERENCE_ENGINES, Engine, EngineBroken, KvPolicy, with_folder
from rollmesh.services.inference.servicer import InferenceServicer
from rollmesh.services.inference.state import ServingState
from rollmesh.services.inference.weight_servicer import WeightServicer
from rollmesh.services.inference.weights import WeightKeeper
from rollmesh.shared.clock import Clock
from rollmesh.shared.codec.trajectory import encode_version
from rollmesh.shared.errors import Draining, EngineFailed
from rollmesh.shared.membership.joined_node import JoinedNode
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.byte_rate import ByteRate
from rollmesh.shared.weights.delta_cache import DeltaCache
from rollmesh.shared.weights.servicer import BlobServicer
from rollmesh.v1 import coordinator_pb2, inference_pb2_grpc, weights_pb2_grpc

_DRAIN_POLL_S = 0.1


class InferenceNode(JoinedNode):
    """One node. Without a `coordinator` address it serves alone, and clients send weights through WeightService."""

    kind = coordinator_pb2.NODE_KIND_INFERENCE

    def __init__(
        self,
        config: InferenceConfig,
        *,
        node_id: str,
        access: Access,
        coordinator: str = "",
        clock: Clock | None = None,
        base_dir: Path | None = None,
        endpoint: str = "",
    ) -> None:
        """Relative files in `config.engine` are relative to `base_dir`. Raises `ConfigError`."""
        super().__init__(
            node_id=node_id,
            access=access,
            coordinator=coordinator,
            capacity=config.capacity,
            server=config.server,
            membership=config.membership,
            clock=clock,
        )
        self.store = BlobStore(Path(config.directory), quota_bytes=config.quota_bytes, durable=False)
        self.engine = make_engine(config, base_dir)
        self.state = ServingState(self.engine, node_id=node_id, policy=config.policy, endpoint=endpoint)
        self._deltas = DeltaCache(self.store, bytes_max=config.delta_bytes_max)
        self._egress = ByteRate(config.egress_bytes_per_s)
        self.keeper = WeightKeeper(
            self.state, self.store, lambda a: open_channel(a, access=access), config, deltas=self._deltas
        )
        self._engine_name = config.engine.name
        self._drain_s = config.drain_s
        self._servicer = InferenceServicer(self.state, config)
        self._commands = WeightCommands(
            self.state,
            self.keeper,
            kv=KvPolicy(config.kv),
            sources=lambda: [node.address for node in self.fleet.nodes(coordinator_pb2.NODE_KIND_DEPOT)],
            send_report=self._report_weights,
        )

    async def build(self, stack: AsyncExitStack) -> None:
        stack.callback(self.store.close)
        await asyncio.to_thread(self.store.start)
        await self.keeper.start()
        stack.push_async_callback(self._deltas.close)
        stack.push_async_callback(self.engine.close)
        await self.engine.start()
        stack.push_async_callback(self.keeper.close)
        self.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, self._servicer)
        self.add(weights_pb2_grpc.add_WeightServiceServicer_to_server, WeightServicer(self.keeper, self.store))
        blobs = BlobServicer(self.store, writable=False, deltas=self._deltas, egress=self._egress)
        self.add(weights_pb2_grpc.add_BlobServiceServicer_to_server, blobs)

    async def run(self) -> None:
        """Work until the command to drain. Raises EngineFailed if the engine reports that it cannot run again in this
        process."""
        working = asyncio.create_task(super().run())
        failing = asyncio.create_task(_failed(self.engine))
        try:
            await asyncio.wait([working, failing], return_when=asyncio.FIRST_COMPLETED)
            if failing.done():
                failing.result()
            working.result()
        finally:
            for task in (working, failing):
                task.cancel()
            await asyncio.wait([working, failing])

    async def finish(self) -> None:
        """Accept no new request. Running requests may finish within `drain_s`; then they end as DRAINING."""
        self.state.draining = True
        deadline_s = self.clock.monotonic_s() + self._drain_s
        while self.state.num_live and self.clock.monotonic_s() < deadline_s:
            await self.clock.sleep(_DRAIN_POLL_S)
        self._end_requests()

    async def end_calls(self) -> None:
        await self._commands.close()
        self._end_requests()

    def _end_requests(self) -> None:
        self.state.draining = True
        self._servicer.end_all(Draining(f"node {self.state.node_id} stops; use another node"))

    def hello(self) -> coordinator_pb2.NodeHello:
        hello, active = super().hello(), self.state.active
        if active is not None:
            hello.active.CopyFrom(encode_version(active))
        hello.held.extend(map(encode_version, self.state.held))
        can = self.engine.capabilities
        hello.capabilities.CopyFrom(
            coordinator_pb2.EngineCapabilities(
                engine=self._engine_name,
                outputs=can.outputs,
                scores=can.scores,
                score_outputs=can.score_outputs,
                versions_max=can.versions_max,
                dtype=can.dtype,
            )
        )
        return hello

    def report(self) -> coordinator_pb2.NodeReport:
        load = self.engine.load()
        if self.state.gate.failure is not None:
            waiting_for = f"a restart: {self.state.gate.failure}"
        else:
            waiting_for = "" if self.state.active is not None else "weights to activate"
        return coordinator_pb2.NodeReport(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            waiting_for=waiting_for,
            held=map(encode_version, self.state.held),
        )

    async def on_weights(self, command: coordinator_pb2.WeightCommand) -> None:
        await self._commands.start(command)

    def _report_weights(self, report: coordinator_pb2.WeightReport) -> None:
        assert self.membership is not None, "commands arrive on the Join stream"
        self.membership.report_weights(report)


async def _failed(engine: Engine) -> None:
    """Raise EngineFailed when the engine has failed, if it reports that."""
    try:
        await engine.failed()
    except EngineBroken as err:
        raise EngineFailed(f"{err}; the node has to be restarted") from err


def make_engine(config: InferenceConfig, base_dir: Path | None = None) -> Engine:
    """Construct the engine that the config names. Raises ConfigError that names the key."""
    chosen = with_folder(config.engine, base_dir, Path(config.directory).absolute() / "engine")
    engine: Engine = INFERENCE_ENGINES.make(chosen, base_dir)
    return engine
