"""A depot put together: store, server, membership, as one async context.

async with DepotNode(config, node_id="depot-0", coordinator="127.0.0.1:7000", access=access) as depot:
    await upload(open_channel(depot.address, access=access), built, owner=version_owner(version))
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmesh.services.weights.config import DepotConfig
from rollmesh.services.weights.servicer import DepotBlobServicer, DepotWeightServicer
from rollmesh.shared.clock import Clock
from rollmesh.shared.membership import Membership, PassiveHandler
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import RpcServer
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.v1 import coordinator_pb2, weights_pb2_grpc


class DepotNode:
    """One depot. Without a `coordinator` address it serves alone."""

    def __init__(
        self, config: DepotConfig, *, node_id: str, access: Access, coordinator: str = "", clock: Clock | None = None
    ) -> None:
        self.store = BlobStore(Path(config.directory), quota_bytes=config.quota_bytes)
        self.membership: Membership | None = None
        self._config = config
        self._node_id = node_id
        self._access = access
        self._coordinator = coordinator
        self._clock = clock
        self._server = RpcServer(config.server, access=access)
        self._stack = AsyncExitStack()

    @property
    def address(self) -> str:
        """host:port, once entered."""
        return self._server.address

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self.store.close)
            await asyncio.to_thread(self.store.start)
            await stack.enter_async_context(self._server)
            blobs = DepotBlobServicer(self.store, versions_max=self._config.versions_max)
            self._server.add(weights_pb2_grpc.add_BlobServiceServicer_to_server, blobs)
            self._server.add(weights_pb2_grpc.add_WeightServiceServicer_to_server, DepotWeightServicer(self.store))
            await self._server.start()
            if self._coordinator:
                self.membership = await stack.enter_async_context(self._membership())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _membership(self) -> Membership:
        hello = coordinator_pb2.NodeHello(
            node_id=self._node_id, kind=coordinator_pb2.NODE_KIND_DEPOT, address=self.address, capacity=1
        )
        return Membership(
            self._coordinator,
            access=self._access,
            handler=PassiveHandler(hello),
            clock=self._clock,
            config=self._config.membership,
        )
