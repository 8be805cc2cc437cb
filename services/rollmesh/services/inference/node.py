"""An inference node put together: engine, weights, server, membership, as one async context.

async with InferenceNode(config, node_id="inf-0", coordinator="127.0.0.1:7000", access=access) as node:
    ...                                 # served at node.address; has no weights until it has activated some
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmesh.services.inference.commands import InferenceHandler
from rollmesh.services.inference.config import InferenceConfig
from rollmesh.services.inference.engine import Engine, KvPolicy
from rollmesh.services.inference.servicer import InferenceServicer
from rollmesh.services.inference.state import NodeState
from rollmesh.services.inference.weight_servicer import WeightServicer
from rollmesh.services.inference.weights import WeightKeeper
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.config import config_from_dict
from rollmesh.shared.errors import Draining
from rollmesh.shared.fleet import Fleet
from rollmesh.shared.membership import Membership
from rollmesh.shared.objects import load_object
from rollmesh.shared.retirement import Retirement
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import RpcServer
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.servicer import BlobServicer
from rollmesh.v1 import coordinator_pb2, inference_pb2_grpc, weights_pb2_grpc

_DRAIN_POLL_S = 0.1


class InferenceNode:
    """One node. Without a `coordinator` address it serves alone, and weights come through WeightService."""

    def __init__(
        self,
        config: InferenceConfig,
        *,
        node_id: str,
        access: Access,
        coordinator: str = "",
        clock: Clock | None = None,
        base_dir: Path | None = None,
    ) -> None:
        """`base_dir` is where relative files in `config.engine` are looked up. Raises `ConfigError`."""
        self.fleet = Fleet()
        self.membership: Membership | None = None
        self.store = BlobStore(Path(config.directory), quota_bytes=config.quota_bytes)
        self.engine = make_engine(config, base_dir)
        self.state = NodeState(self.engine, node_id=node_id, policy=config.policy)
        self.keeper = WeightKeeper(self.state, self.store, lambda a: open_channel(a, access=access), config)
        self._config = config
        self._access = access
        self._coordinator = coordinator
        self._clock = clock or SystemClock()
        self._server = RpcServer(config.server, access=access)
        self._servicer = InferenceServicer(self.state, config)
        self._retirement = Retirement(self.drain)
        self._stack = AsyncExitStack()

    @property
    def address(self) -> str:
        """host:port, once entered."""
        return self._server.address

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self.store.close)
            await asyncio.to_thread(self.store.start)
            stack.push_async_callback(self.engine.close)
            await self.engine.start()
            stack.push_async_callback(self.keeper.close)
            await stack.enter_async_context(self._server)
            await self._serve()
            stack.callback(self._refuse_all)
            stack.push_async_callback(self._retirement.close)
            if self._coordinator:
                self.membership = await stack.enter_async_context(self._join(stack))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def wait(self) -> None:
        """Until the node was drained: nothing runs any more, it only has to leave."""
        await self._retirement.wait()

    async def drain(self) -> None:
        """Takes nothing new; what runs may end within `drain_s`, then it ends as DRAINING and goes on elsewhere."""
        self.state.draining = True
        deadline_s = self._clock.monotonic_s() + self._config.drain_s
        while self.state.num_live and self._clock.monotonic_s() < deadline_s:
            await self._clock.sleep(_DRAIN_POLL_S)
        self._refuse_all()

    def _refuse_all(self) -> None:
        self.state.draining = True
        self._servicer.end_all(Draining(f"node {self.state.node_id} stops; go to another node"))

    async def _serve(self) -> None:
        server = self._server
        server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, self._servicer)
        server.add(weights_pb2_grpc.add_WeightServiceServicer_to_server, WeightServicer(self.keeper, self.store))
        server.add(weights_pb2_grpc.add_BlobServiceServicer_to_server, BlobServicer(self.store, writable=False))
        await server.start()

    def _join(self, stack: AsyncExitStack) -> Membership:
        handler = InferenceHandler(
            self.state,
            self.keeper,
            address=self.address,
            capacity=self._config.capacity,
            kv=KvPolicy(self._config.kv),
            sources=self._depots,
            drain=self._retirement.begin,
        )
        membership = Membership(
            self._coordinator,
            access=self._access,
            handler=handler,
            clock=self._clock,
            config=self._config.membership,
            fleet=self.fleet,
        )
        handler.report_weights = membership.report_weights
        stack.push_async_callback(handler.close)
        return membership

    def _depots(self) -> list[str]:
        return [node.address for node in self.fleet.nodes(coordinator_pb2.NODE_KIND_DEPOT)]


def make_engine(config: InferenceConfig, base_dir: Path | None = None) -> Engine:
    """The engine that the config names. Raises `ConfigError` naming the key."""
    options = config_from_dict(load_object(config.engine_config, base_dir), config.engine_options)
    engine: Engine = load_object(config.engine, base_dir)(options)
    return engine
