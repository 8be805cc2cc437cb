"""A sandbox node put together: engine, leases, reaper, servicer; and, around it, server and membership.

    async with SandboxNode(config, node_id="sandbox-0", access=access, coordinator=address, state_dir=...) as node:
        node.address

`SandboxCore` is the node without a server. Leaving either gives commands in progress `stop_s`, then ends every session;
nothing of them is left.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmesh.services.sandbox.branches import Branches
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engine import ENGINES, PoolCounts, SandboxEngine
from rollmesh.services.sandbox.servicer import SandboxServicer
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.services.sandbox.snapshots import Snapshots
from rollmesh.services.sandbox.stateless_calls import StatelessCalls
from rollmesh.shared.clock import Clock
from rollmesh.shared.domain.ids import IdSource, RandomIds
from rollmesh.shared.membership.joined_node import JoinedNode
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.v1 import coordinator_pb2, sandbox_pb2_grpc


class SandboxCore:
    """Engine, sessions, snapshots and servicer of a node. `state_dir` belongs to this node alone and persists over
    restarts, so that a restart can clean up after a crash."""

    def __init__(
        self,
        config: SandboxConfig,
        *,
        state_dir: Path,
        clock: Clock,
        ids: IdSource,
        server: ServerConfig | None = None,
    ) -> None:
        """`server` is what serves it; the default bounds answers by the default size of a message."""
        self._config = config
        self._engine = make_engine(config, state_dir=state_dir, ids=ids, clock=clock)
        self.sessions = Sessions(self._engine, config, clock)
        self.snapshots = Snapshots(state_dir / "snapshots", config.snapshots, clock=clock, ids=ids)
        self.branches = Branches(self._engine, self.sessions, self.snapshots)
        self.stateless = StatelessCalls(self.sessions, config, clock=clock, ids=ids)
        self.servicer = SandboxServicer(
            self.sessions,
            self.branches,
            self.stateless,
            config,
            clock=clock,
            ids=ids,
            message_bytes_max=(server or ServerConfig()).message_bytes_max,
        )
        self._reapers: list[asyncio.Task[None]] = []

    @property
    def num_queued(self) -> int:
        """Number of sessions that wait for their start."""
        return self._engine.num_queued

    def pool_counts(self) -> PoolCounts:
        """Return the counters of ready sessions."""
        return self._engine.pool_counts()

    async def __aenter__(self) -> Self:
        try:
            await self._engine.start()
            await self.snapshots.start()
        except BaseException:
            await self._engine.close()
            raise
        self._reapers = [
            asyncio.create_task(self.sessions.reap(), name="sandbox reaper"),
            asyncio.create_task(self.snapshots.reap(self._config.reap_every_s), name="snapshot reaper"),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give commands in progress `stop_s`, then end every session. Idempotent."""
        reapers, self._reapers = self._reapers, []
        if not reapers:
            return
        for reaper in reapers:
            reaper.cancel()
        try:
            await self.servicer.drain(self._config.stop_s)
            await asyncio.wait(reapers)
            for reaper in reapers:
                if not reaper.cancelled():
                    reaper.result()
        finally:
            await self.stateless.close()
            await self.snapshots.close()
            await self._engine.close()


class SandboxNode(JoinedNode):
    """One node. Without a `coordinator` address it serves alone."""

    kind = coordinator_pb2.NODE_KIND_SANDBOX

    def __init__(
        self,
        config: SandboxConfig,
        *,
        node_id: str,
        access: Access,
        state_dir: Path,
        coordinator: str = "",
        clock: Clock | None = None,
        ids: IdSource | None = None,
        server: ServerConfig | None = None,
    ) -> None:
        super().__init__(
            node_id=node_id,
            access=access,
            coordinator=coordinator,
            capacity=config.sessions_max,
            server=server,
            clock=clock,
        )
        self.core = SandboxCore(config, state_dir=state_dir, clock=self.clock, ids=ids or RandomIds(), server=server)

    async def build(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self.core)
        self.add(sandbox_pb2_grpc.add_SandboxServiceServicer_to_server, self.core.servicer)

    async def finish(self) -> None:
        await self.core.stateless.drain()
        await self.core.sessions.drain()

    async def end_calls(self) -> None:
        await self.core.close()

    def report(self) -> coordinator_pb2.NodeReport:
        return coordinator_pb2.NodeReport(num_running=self.core.sessions.counts().live)


def make_engine(config: SandboxConfig, *, state_dir: Path, ids: IdSource, clock: Clock | None = None) -> SandboxEngine:
    """Construct the engine that `config.engine` names. Raise ConfigError."""
    engine: SandboxEngine = ENGINES.make(config.engine, config=config, state_dir=state_dir, ids=ids, clock=clock)
    return engine
