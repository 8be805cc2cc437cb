"""`DirectServer`: the server's side of direct calls, and the table in which clients of the same event loop find it.

A call runs as a task in the context in which the server started, through the same interceptors and handlers as a call from a socket. The
limits of the server count direct calls as those of one connection per channel.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any
from weakref import WeakKeyDictionary

import grpc

from rollmesh.shared.rpc.direct.context import DirectContext
from rollmesh.shared.rpc.direct.rpc import EOF, DirectRpc, Metadata, RpcStatus
from rollmesh.shared.rpc.handlers import Handler, behavior_of

HANDLERS_MAX = 1024
"""Number of wrapped handlers that are kept for repeated calls."""
_NOT_FOUND = RpcStatus(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
_TOO_MANY = RpcStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
_STOPPED = RpcStatus(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
_NO_REQUEST = RpcStatus(grpc.StatusCode.INTERNAL, "the call ended without a request")
_CANCELLED = RpcStatus(grpc.StatusCode.CANCELLED, "the handler was cancelled")
_log = logging.getLogger(__name__)

_tables: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, DirectServer]] = WeakKeyDictionary()


def servers_here() -> dict[str, DirectServer]:
    """Return the servers that accept direct calls on the running event loop, by address."""
    return _tables.setdefault(asyncio.get_running_loop(), {})


class _Details(grpc.HandlerCallDetails):
    """Method and metadata of a call, as interceptors read them."""

    def __init__(self, method: str, metadata: Metadata) -> None:
        self.method = method
        self.invocation_metadata = metadata


class DirectServer:
    """Serves direct calls from `start` to `stop`."""

    def __init__(
        self,
        handlers: Sequence[Any],
        interceptors: Sequence[Any],
        *,
        message_bytes_max: int,
        concurrent_rpcs_max: int,
        channel_rpcs_max: int,
    ) -> None:
        """`handlers` are generic handlers; the list may grow until `start`."""
        self.message_bytes_max = message_bytes_max
        self.channel_rpcs_max = channel_rpcs_max
        """Maximum number of calls in progress of one channel."""
        self._handlers = handlers
        self._concurrent_rpcs_max = concurrent_rpcs_max
        self._resolve: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]] = self._find
        for interceptor in reversed(interceptors):
            self._resolve = functools.partial(interceptor.intercept_service, self._resolve)
        self._resolved: dict[tuple[str, Metadata], Handler] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._rpcs: set[DirectRpc] = set()
        self._address = ""
        self._context = contextvars.copy_context()

    def start(self, address: str) -> None:
        """Accept calls to `address` from clients of the running event loop."""
        self._address = address
        self._context = contextvars.copy_context()
        servers_here()[address] = self

    async def stop(self, grace_s: float) -> None:
        """Reject new calls, wait up to `grace_s` for calls in progress, then end them with UNAVAILABLE and wait for their handlers. Idempotent."""
        servers = servers_here()
        if servers.get(self._address) is self:
            del servers[self._address]
        self._address = ""
        if self._tasks and grace_s > 0:
            await asyncio.wait(self._tasks, timeout=grace_s)
        for rpc in list(self._rpcs):
            rpc.finish(_STOPPED)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def serve(self, rpc: DirectRpc) -> None:
        """Start the handler of a call."""
        if rpc.status is not None:
            return
        if not self._address:
            rpc.finish(_STOPPED)
        elif len(self._tasks) >= self._concurrent_rpcs_max:
            rpc.finish(_TOO_MANY)
        else:
            task = asyncio.get_running_loop().create_task(self._run(rpc), context=self._context.copy())
            rpc.run_by(task)
            self._tasks.add(task)
            self._rpcs.add(rpc)
            task.add_done_callback(functools.partial(self._forget, rpc))

    def _forget(self, rpc: DirectRpc, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._rpcs.discard(rpc)
        rpc.finish(_CANCELLED)  # no effect unless the handler has cancelled itself

    async def _run(self, rpc: DirectRpc) -> None:
        handler = await self._handler_of(rpc)
        if handler is None:
            rpc.finish(_NOT_FOUND)
            return
        context = DirectContext(rpc, handler.request_deserializer, handler.response_serializer)
        try:
            request: Any = context.requests() if handler.request_streaming else await context.read()
            if request is EOF:
                rpc.finish(_NO_REQUEST)
                return
            await _call(handler, request, context)
            context.finish()
        except grpc.aio.AbortError:
            pass  # the call has its status
        except Exception as err:  # noqa: BLE001 (outside of the interceptors: a response that cannot be encoded)
            _log.exception("%s failed", rpc.method)
            rpc.finish(RpcStatus(grpc.StatusCode.UNKNOWN, f"Unexpected {type(err)}: {err}"))

    async def _handler_of(self, rpc: DirectRpc) -> Handler:
        """Return the handler of a call within the interceptors, which depends on its method and metadata only."""
        key = (rpc.method, rpc.metadata)
        handler = self._resolved.get(key)
        if handler is None:
            handler = await self._resolve(_Details(rpc.method, rpc.metadata))
            if len(rpc.metadata) == 1 and len(self._resolved) < HANDLERS_MAX:  # other metadata differ with every call
                self._resolved[key] = handler
        return handler

    async def _find(self, details: grpc.HandlerCallDetails) -> Handler:
        for one in self._handlers:
            handler = one.service(details)
            if handler is not None:
                return handler
        return None


async def _call(handler: Handler, request: Any, context: DirectContext) -> None:
    """Run the handler, and send its responses."""
    behavior = behavior_of(handler)
    if inspect.isasyncgenfunction(behavior):
        async with aclosing(behavior(request, context)) as responses:
            async for response in responses:
                await context.write(response)
        return
    response = await behavior(request, context)
    if not handler.response_streaming and context.code() == 0:
        await context.write(response)
