"""`RewardNode`: scoring engine, servicer and the client of the sandbox nodes."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from rollmesh.services.reward.config import RewardConfig, build_engine
from rollmesh.services.reward.servicer import RewardServicer
from rollmesh.shared.clients.sandbox import SandboxClient
from rollmesh.shared.clock import Clock
from rollmesh.shared.joined_node import JoinedNode
from rollmesh.shared.registry import Extension
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.v1 import coordinator_pb2, reward_pb2_grpc


class RewardNode(JoinedNode):
    """A reward node. Without a `coordinator` address it does not join a mesh."""

    kind = coordinator_pb2.NODE_KIND_REWARD

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
        estimator: Extension | str = "grpo",
    ) -> None:
        """Relative files in the config are relative to `base_dir`; `estimator` is the trainer's. Raises ConfigError or RecordError."""
        super().__init__(
            node_id=node_id,
            access=access,
            coordinator=coordinator,
            capacity=config.concurrency_max,
            server=server,
            clock=clock,
        )
        self._sandbox = SandboxClient(
            lambda: (*config.sandboxes, *self.ready(coordinator_pb2.NODE_KIND_SANDBOX)),
            lambda address: open_channel(address, access=access),
            self.clock,
            config.sandbox,
        )
        self.engine = build_engine(config, base_dir, self._sandbox, estimator)
        self._servicer = RewardServicer(self.engine, finalizer_name=config.finalizer.name)

    async def build(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._sandbox.close)
        stack.push_async_callback(self.engine.close)
        self.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, self._servicer)
