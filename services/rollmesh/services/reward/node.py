"""A reward node put together: engine, servicer, server, membership, as one async context."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmesh.services.reward.config import RewardConfig, build_engine
from rollmesh.services.reward.servicer import RewardServicer
from rollmesh.shared.clients.sandbox import SandboxClient
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.serving import JoinedServer
from rollmesh.trainer.advantages import AdvantageConfig
from rollmesh.v1 import coordinator_pb2, reward_pb2_grpc


class RewardNode:
    """One node. Without a `coordinator` address it serves alone."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        node_id: str,
        access: Access,
        coordinator: str = "",
        clock: Clock | None = None,
        base_dir: Path | None = None,
        server: ServerConfig | None = None,
        advantage: AdvantageConfig | None = None,
    ) -> None:
        """Relative files in the config are looked up in `base_dir`; `advantage` is the trainer's. Raises ConfigError or RecordError."""
        self._addresses = config.sandboxes
        self._sandbox = SandboxClient(
            self._sandboxes,
            lambda address: open_channel(address, access=access),
            clock or SystemClock(),
            config.sandbox,
        )
        self.engine = build_engine(config, base_dir, self._sandbox, advantage)
        self._servicer = RewardServicer(self.engine, finalizer_name=config.finalizer.name)
        self._joined = JoinedServer(
            kind=coordinator_pb2.NODE_KIND_REWARD,
            node_id=node_id,
            access=access,
            coordinator=coordinator,
            capacity=config.concurrency_max,
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

    def _sandboxes(self) -> Sequence[str]:
        membership = self._joined.membership
        if membership is None:
            return self._addresses
        nodes = membership.fleet.nodes(coordinator_pb2.NODE_KIND_SANDBOX)
        ready = [node.address for node in nodes if node.state == coordinator_pb2.NODE_STATE_READY]
        return (*self._addresses, *ready)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._sandbox.close)
            stack.push_async_callback(self.engine.close)
            await stack.enter_async_context(self._joined)
            self._joined.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, self._servicer)
            await self._joined.start()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
