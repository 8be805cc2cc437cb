"""`JoinedNode`: the lifecycle that every node of the mesh has, except the coordinator.

    async with RewardNode(config, node_id="reward-0", access=access, coordinator="127.0.0.1:7000") as node:
        node.address                    # host:port, if the node serves
        await node.wait()               # until the node was drained and has finished; raises the error that stopped it

Entering runs `build`, starts the server, joins the coordinator, and starts `run` in a task. The address is bound before
the node joins, so that the coordinator never announces a server that does not respond. Leaving cancels the task, leaves
the mesh, runs `end_calls`, stops the server, and closes what `build` has put on the stack, in reverse order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, ClassVar, Self

from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.membership.fleet import KnownFleet
from rollmesh.shared.membership.membership import Membership, MembershipConfig
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.limits import RequestLimits
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.v1 import coordinator_pb2

_log = logging.getLogger(__name__)


class JoinedNode:
    """Base class of nodes; it is also their `NodeHandler`. Without a `coordinator` address a node serves alone."""

    kind: ClassVar[coordinator_pb2.NodeKind.ValueType]
    serves: ClassVar[bool] = True
    """Whether the node has a gRPC server."""

    def __init__(
        self,
        *,
        node_id: str,
        access: Access,
        coordinator: str = "",
        capacity: int = 1,
        server: ServerConfig | None = None,
        membership: MembershipConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.node_id = node_id
        self.access = access
        self.coordinator = coordinator
        self.clock = clock or SystemClock()
        self.fleet = KnownFleet()
        """The nodes of the mesh; empty until the node has joined."""
        self.membership: Membership | None = None
        self._capacity = capacity
        self._membership_config = membership
        self._server_config = server
        self._server: RpcServer | None = None
        self._draining = asyncio.Event()
        self._took_work = False
        self._task: asyncio.Task[None] | None = None
        self._stack = AsyncExitStack()

    # Hooks of a node --------------------------------------------------------------------------------------------------

    async def build(self, stack: AsyncExitStack) -> None:
        """Start the parts of the node, put their ends on `stack`, and `add` the services."""
        raise NotImplementedError

    async def run(self) -> None:
        """Work until the node is done. The default waits for the command to drain, then calls `finish`."""
        await self._draining.wait()
        await self.finish()

    async def finish(self) -> None:
        """Finish accepted work after the command to drain, within a limit. The server still accepts calls."""

    async def end_calls(self) -> None:
        """End the calls in progress after the node has left the mesh. Calls that remain end with the server's
        `stop_s`."""

    # NodeHandler ------------------------------------------------------------------------------------------------------

    def hello(self) -> coordinator_pb2.NodeHello:
        return coordinator_pb2.NodeHello(
            node_id=self.node_id, kind=self.kind, address=self.address, capacity=self._capacity
        )

    def report(self) -> coordinator_pb2.NodeReport:
        return coordinator_pb2.NodeReport()

    async def on_weights(self, command: coordinator_pb2.WeightCommand) -> None: ...

    async def on_cancel(self, command: coordinator_pb2.CancelEpisodes) -> None: ...

    async def on_drain(self) -> None:
        self._draining.set()

    # Lifecycle --------------------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """host:port once entered; empty for a node without a server."""
        return self._server.address if self._server is not None else ""

    def add(
        self, add_to_server: Callable[[Any, Any], None], servicer: object, *, limits: RequestLimits | None = None
    ) -> None:
        """Serve `servicer` as `RpcServer.add` does. Call it in `build`."""
        assert self._server is not None, "a node without a server"
        self._server.add(add_to_server, servicer, limits=limits)

    def ready(self, kind: coordinator_pb2.NodeKind.ValueType) -> list[str]:
        """Addresses of the nodes of `kind` that are READY."""
        return [node.address for node in self.fleet.nodes(kind) if node.state == coordinator_pb2.NODE_STATE_READY]

    @property
    def takes_work(self) -> bool:
        """Whether the node has been usable since its last join, for a probe: it is READY, or no node of its kind is,
        because there is no work yet. It stays so while the coordinator is away, and ends with the command to drain."""
        membership = self.membership
        if membership is None or membership.draining:
            return membership is None
        if not self._took_work and membership.joined:
            ready = [n.node_id for n in self.fleet.nodes(self.kind) if n.state == coordinator_pb2.NODE_STATE_READY]
            self._took_work = self.fleet.revision > 0 and (not ready or self.node_id in ready)
        return self._took_work

    async def drain(self) -> None:
        """Drain on the request of this process. The coordinator is asked first, so that other nodes send no new work;
        if it does not respond within `DRAIN_CALL_S_MAX`, the node drains without it."""
        if self.membership is not None:
            await self.membership.drain()
        else:
            await self.on_drain()

    async def wait(self) -> None:
        """Return once `run` has finished; the host then leaves the context. Raises the error that stopped it, and the
        rejection if the coordinator does not accept this node."""
        assert self._task is not None, "not entered"
        ends: list[asyncio.Future[None]] = [self._task]
        if self.membership is not None:
            ends.append(asyncio.create_task(self.membership.rejected(), name=f"{self.node_id} rejected"))
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for rejected in ends[1:]:
                rejected.cancel()
        await next(end for end in ends if end in done)

    async def __aenter__(self) -> Self:
        if self.serves:
            self._server = RpcServer(self._server_config, access=self.access)
        async with AsyncExitStack() as stack:
            await self.build(stack)
            if self._server is not None:
                stack.push_async_callback(self._server.stop)
                await self._server.start()
            stack.push_async_callback(self.end_calls)
            if self.coordinator:
                self.membership = Membership(
                    self.coordinator,
                    access=self.access,
                    handler=self,
                    clock=self.clock,
                    config=self._membership_config,
                    fleet=self.fleet,
                )
                await stack.enter_async_context(self.membership)
            self._task = asyncio.create_task(self.run(), name=self.node_id)
            self._task.add_done_callback(_log_end)
            stack.push_async_callback(_cancel, self._task)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()


async def _cancel(task: asyncio.Task[None]) -> None:
    """Cancel `run`. Its error, if it has failed before, is for `wait` to raise."""
    task.cancel()
    await asyncio.wait([task])


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (err := task.exception()) is not None:
        _log.error("node stopped: node=%s error=%s: %s", task.get_name(), type(err).__name__, err)
