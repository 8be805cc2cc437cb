"""`DataNode`: the engine that draws tasks, and its servicer."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from rollmesh.services.data.config import DataConfig, build_engine
from rollmesh.services.data.servicer import DataServicer
from rollmesh.services.data.snapshots import SnapshotFolder
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.clock import Clock
from rollmesh.shared.endpoints.blocking import BlockingEndpoints
from rollmesh.shared.membership.joined_node import JoinedNode
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.v1 import coordinator_pb2, data_pb2_grpc


class DataNode(JoinedNode):
    """A data node. Without a `coordinator` address it does not join a mesh."""

    kind = coordinator_pb2.NODE_KIND_DATA

    def __init__(
        self,
        config: DataConfig,
        *,
        node_id: str,
        access: Access,
        bus: Bus,
        coordinator: str = "",
        clock: Clock | None = None,
        base_dir: Path | None = None,
        server: ServerConfig | None = None,
        snapshots: SnapshotFolder | None = None,
        endpoints: BlockingEndpoints | None = None,
    ) -> None:
        """Read the ledgers on `bus`. Files in the config are relative to `base_dir`. Raises ConfigError or
        RecordError."""
        super().__init__(node_id=node_id, access=access, coordinator=coordinator, server=server, clock=clock)
        self.engine = build_engine(
            config, bus=bus, clock=self.clock, base_dir=base_dir, snapshots=snapshots, endpoints=endpoints
        )

    async def build(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self.engine.close)
        self.add(data_pb2_grpc.add_DataServiceServicer_to_server, DataServicer(self.engine))
