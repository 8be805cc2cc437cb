"""`DepotNode`: the durable store of weight versions and its servicers.

async with DepotNode(config, node_id="depot-0", coordinator="127.0.0.1:7000", access=access) as depot:
    await upload(open_channel(depot.address, access=access), built, owner=version_owner(version, run))
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from rollmesh.services.weights.config import DepotConfig
from rollmesh.services.weights.servicer import DepotBlobServicer, DepotWeightServicer
from rollmesh.shared.clock import Clock
from rollmesh.shared.membership.joined_node import JoinedNode
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.weights.blobs import BlobStore
from rollmesh.shared.weights.byte_rate import ByteRate
from rollmesh.shared.weights.delta_cache import DeltaCache
from rollmesh.v1 import coordinator_pb2, weights_pb2_grpc


class DepotNode(JoinedNode):
    """One depot. Without a `coordinator` address it serves alone. Its versions stay in its folder."""

    kind = coordinator_pb2.NODE_KIND_DEPOT

    def __init__(
        self, config: DepotConfig, *, node_id: str, access: Access, coordinator: str = "", clock: Clock | None = None
    ) -> None:
        super().__init__(
            node_id=node_id,
            access=access,
            coordinator=coordinator,
            server=config.server,
            membership=config.membership,
            clock=clock,
        )
        self.store = BlobStore(Path(config.directory), quota_bytes=config.quota_bytes)
        self.egress = ByteRate(config.egress_bytes_per_s)
        self._config = config

    async def build(self, stack: AsyncExitStack) -> None:
        stack.callback(self.store.close)
        await asyncio.to_thread(self.store.start)
        config, deltas = self._config, DeltaCache(self.store, bytes_max=self._config.delta_bytes_max)
        stack.push_async_callback(deltas.close)
        blobs = DepotBlobServicer(
            self.store,
            versions_max=config.versions_max,
            deltas=deltas if config.delta_bytes_max else None,
            egress=self.egress,
        )
        self.add(weights_pb2_grpc.add_BlobServiceServicer_to_server, blobs)
        self.add(weights_pb2_grpc.add_WeightServiceServicer_to_server, DepotWeightServicer(self.store))
