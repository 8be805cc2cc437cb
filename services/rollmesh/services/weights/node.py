"""A depot put together: store, server, membership, as one async context.

async with DepotNode(config, node_id="depot-0", coordinator="127.0.0.1:7000", access=access) as depot:
    await upload(open_channel(depot.address, access=access), built, owner=version_owner(version, run))
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
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.serving import JoinedServer
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.v1 import coordinator_pb2, weights_pb2_grpc


class DepotNode:
    """One depot. Without a `coordinator` address it serves alone."""

    def __init__(
        self, config: DepotConfig, *, node_id: str, access: Access, coordinator: str = "", clock: Clock | None = None
    ) -> None:
        self.store = BlobStore(Path(config.directory), quota_bytes=config.quota_bytes)
        self._config = config
        self._joined = JoinedServer(
            kind=coordinator_pb2.NODE_KIND_DEPOT,
            node_id=node_id,
            access=access,
            coordinator=coordinator,
            server=config.server,
            membership=config.membership,
            clock=clock,
        )
        self._stack = AsyncExitStack()

    @property
    def address(self) -> str:
        """host:port, once entered."""
        return self._joined.address

    async def wait(self) -> None:
        """Until the depot was drained: it only has to leave. Its versions stay in its folder."""
        await self._joined.wait()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.callback(self.store.close)
            await asyncio.to_thread(self.store.start)
            joined = await stack.enter_async_context(self._joined)
            blobs = DepotBlobServicer(self.store, versions_max=self._config.versions_max)
            joined.add(weights_pb2_grpc.add_BlobServiceServicer_to_server, blobs)
            joined.add(weights_pb2_grpc.add_WeightServiceServicer_to_server, DepotWeightServicer(self.store))
            await joined.start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
