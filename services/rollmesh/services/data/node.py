"""A data node put together: engine, servicer, server, membership, as one async context."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmesh.services.data.config import DataConfig, build_engine
from rollmesh.services.data.servicer import DataServicer
from rollmesh.services.data.snapshots import SnapshotFolder
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.serving import JoinedServer
from rollmesh.v1 import coordinator_pb2, data_pb2_grpc


class DataNode:
    """One node. Without a `coordinator` address it serves alone."""

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
    ) -> None:
        """Follows the ledgers on `bus`. Relative files in the config are looked up in `base_dir`. Raises ConfigError or RecordError."""
        self.engine = build_engine(
            config, bus=bus, clock=clock or SystemClock(), base_dir=base_dir, snapshots=snapshots
        )
        self._servicer = DataServicer(self.engine)
        self._joined = JoinedServer(
            kind=coordinator_pb2.NODE_KIND_DATA,
            node_id=node_id,
            access=access,
            coordinator=coordinator,
            server=server,
            clock=clock,
        )
        self._stack = AsyncExitStack()

    @property
    def address(self) -> str:
        """host:port, once entered."""
        return self._joined.address

    async def wait(self) -> None:
        """Until the node was drained: it only has to leave."""
        await self._joined.wait()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.engine.close)
            await stack.enter_async_context(self._joined)
            self._joined.add(data_pb2_grpc.add_DataServiceServicer_to_server, self._servicer)
            await self._joined.start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
