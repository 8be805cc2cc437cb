"""A server that has joined the mesh: what nodes without commands of their own (reward, data, sandbox) have in common.

    async with JoinedServer(hello, server=config, access=access, coordinator=address) as joined:
        joined.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer)
        await joined.start()

The address is bound before the hello, so that nobody is told of a server that does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from rollmesh.shared.clock import Clock
from rollmesh.shared.membership import Membership, MembershipConfig, PassiveHandler
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.v1 import coordinator_pb2


class JoinedServer:
    """Without a `coordinator` address it serves alone."""

    def __init__(
        self,
        *,
        kind: coordinator_pb2.NodeKind.ValueType,
        node_id: str,
        access: Access,
        coordinator: str = "",
        capacity: int = 1,
        server: ServerConfig | None = None,
        membership: MembershipConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.membership: Membership | None = None
        self._kind = kind
        self._node_id = node_id
        self._access = access
        self._coordinator = coordinator
        self._capacity = capacity
        self._config = membership
        self._clock = clock
        self._server = RpcServer(server, access=access)
        self._stack = AsyncExitStack()

    @property
    def address(self) -> str:
        """host:port, once started."""
        return self._server.address

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: object) -> None:
        """Serves `servicer`; before `start`."""
        self._server.add(add_to_server, servicer)

    async def start(self) -> None:
        """Binds, serves, joins. Raises `ConfigError` if it cannot bind."""
        await self._server.start()
        if self._coordinator:
            self.membership = await self._stack.enter_async_context(self._make_membership())

    def _make_membership(self) -> Membership:
        hello = coordinator_pb2.NodeHello(
            node_id=self._node_id, kind=self._kind, address=self.address, capacity=self._capacity
        )
        return Membership(
            self._coordinator,
            access=self._access,
            handler=PassiveHandler(hello),
            clock=self._clock,
            config=self._config,
        )

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._server)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
