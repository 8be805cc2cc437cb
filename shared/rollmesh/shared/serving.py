"""A server that has joined the mesh: what nodes without weights (reward, data, sandbox, gateway, depot) have in common.

    async with JoinedServer(hello, server=config, access=access, coordinator=address) as joined:
        joined.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer)
        await joined.start()
        await joined.wait()             # until it was told to drain and has finished

The address is bound before the hello, so that nobody is told of a server that does not answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from rollmesh.shared.clock import Clock
from rollmesh.shared.membership import Membership, MembershipConfig, PassiveHandler
from rollmesh.shared.retirement import Retirement
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.limits import RequestLimits
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
        load: Callable[[], coordinator_pb2.NodeReport] = coordinator_pb2.NodeReport,
        finish: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`load` is what heartbeats tell; `finish` comes between the command to drain and leaving, and has a limit of its own."""
        self.membership: Membership | None = None
        self._kind = kind
        self._node_id = node_id
        self._access = access
        self._coordinator = coordinator
        self._capacity = capacity
        self._config = membership
        self._clock = clock
        self._load = load
        self._retirement = Retirement(finish or _at_once)
        self._server = RpcServer(server, access=access)
        self._stack = AsyncExitStack()

    @property
    def address(self) -> str:
        """host:port, once started."""
        return self._server.address

    def add(
        self, add_to_server: Callable[[Any, Any], None], servicer: object, *, limits: RequestLimits | None = None
    ) -> None:
        """Serve `servicer` as `RpcServer.add` does; call it before `start`."""
        self._server.add(add_to_server, servicer, limits=limits)

    async def wait(self) -> None:
        """Until the node was drained: what it had is finished, it only has to leave."""
        await self._retirement.wait()

    async def start(self) -> None:
        """Binds, serves, joins. Raises `ConfigError` if it cannot bind."""
        await self._server.start()
        self._stack.push_async_callback(self._retirement.close)
        if self._coordinator:
            self.membership = await self._stack.enter_async_context(self._make_membership())

    def _make_membership(self) -> Membership:
        hello = coordinator_pb2.NodeHello(
            node_id=self._node_id, kind=self._kind, address=self.address, capacity=self._capacity
        )
        return Membership(
            self._coordinator,
            access=self._access,
            handler=_Commands(hello, self._load, self._retirement),
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


class _Commands(PassiveHandler):
    """The one command that every server obeys: to finish and leave."""

    def __init__(
        self,
        hello: coordinator_pb2.NodeHello,
        load: Callable[[], coordinator_pb2.NodeReport],
        retirement: Retirement,
    ) -> None:
        super().__init__(hello)
        self._load = load
        self._retirement = retirement

    def report(self) -> coordinator_pb2.NodeReport:
        return self._load()

    async def on_drain(self) -> None:
        self._retirement.begin()


async def _at_once() -> None:
    """Calls in progress are ended by the server's own limit."""
