"""A server that echoes, and calls to it, for the tests of `rollmesh.shared.rpc`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry import trace

from rollmesh.shared import errors
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import MeshChannel, open_channel
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.shared.rpc.status import typed_errors

TOKEN = "test-token"
ACCESS = Access(token=TOKEN)
ARITIES = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Echo:
    """Answers with what it got; a request `raise X` raises the error X names, `wait` never answers."""

    def __init__(self) -> None:
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.traceparent = ""

    async def _act(self, request: bytes) -> bytes:
        span = trace.get_current_span().get_span_context()
        self.traceparent = f"{span.trace_id:032x}" if span.is_valid else ""
        if request == b"wait":
            self.waiting.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if request == b"raise bug":
            raise ZeroDivisionError("secret detail")
        if request == b"raise stale":
            raise errors.StaleWeights("node n1 is at step 3; ask another node", node="n1", step=3)
        if request == b"raise invalid":
            raise errors.InvalidInput("bad", violations=[errors.FieldViolation("a.b", "must be >= 1, got -1")])
        if request == b"raise long":
            raise errors.Overloaded("x" * 100_000, retry_after_s=2.5, detail="y" * 100_000)
        return request

    async def unary_unary(self, request: bytes, context: Any) -> bytes:
        return await self._act(request)

    async def unary_stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield await self._act(b"first")
        yield await self._act(request)

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([await self._act(request) async for request in requests])

    async def stream_stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield await self._act(request)

    async def written(self, request: bytes, context: Any) -> None:
        await context.write(await self._act(b"first"))
        await context.write(await self._act(request))

    def generated_default(self, request: bytes, context: Any) -> None:
        raise NotImplementedError


def add_echo(servicer: Echo, server: Any) -> None:
    methods = {name: getattr(grpc, f"{name}_rpc_method_handler")(getattr(servicer, name)) for name in ARITIES}
    methods["written"] = grpc.unary_stream_rpc_method_handler(servicer.written)
    methods["missing"] = grpc.unary_unary_rpc_method_handler(servicer.generated_default)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", methods),))


@asynccontextmanager
async def echo_server(config: ServerConfig | None = None, echo: Echo | None = None) -> AsyncIterator[RpcServer]:
    async with RpcServer(config or ServerConfig(stop_s=0.0), access=ACCESS) as server:
        server.add(add_echo, echo or Echo())
        await server.start()
        yield server


@asynccontextmanager
async def echo_channel(server_config: ServerConfig | None = None, **kwargs: Any) -> AsyncIterator[MeshChannel]:
    async with echo_server(server_config) as server, open_channel(server.address, access=ACCESS, **kwargs) as channel:
        yield channel


async def call(channel: grpc.aio.Channel, arity: str, request: bytes, **kwargs: Any) -> list[bytes]:
    """One call of any arity with one request; its answers. Raises MeshError."""
    method: Any = getattr(channel, arity)(f"/test.Echo/{arity}")

    async def requests() -> AsyncIterator[bytes]:
        yield request

    with typed_errors():
        answer = method(requests() if arity.startswith("stream") else request, **kwargs)
        if arity.endswith("unary"):
            return [await answer]
        return [response async for response in answer]


async def drain(responses: AsyncIterator[bytes]) -> list[bytes]:
    return [response async for response in responses]


async def raised(channel: grpc.aio.Channel, arity: str, request: bytes, **kwargs: Any) -> errors.MeshError:
    with pytest.raises(errors.MeshError) as caught:
        await call(channel, arity, request, **kwargs)
    return caught.value


METHOD = "/test.One/Call"


@asynccontextmanager
async def one_method(
    arity: str, behavior: Any, config: ServerConfig | None = None, **coders: Any
) -> AsyncIterator[RpcServer]:
    """A server with one method, `METHOD`."""
    handler = getattr(grpc, f"{arity}_rpc_method_handler")(behavior, **coders)

    def add(_: object, server: Any) -> None:
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.One", {"Call": handler}),))

    async with RpcServer(config or ServerConfig(stop_s=0.0), access=ACCESS) as server:
        server.add(add, None)
        await server.start()
        yield server


@asynccontextmanager
async def one_call(arity: str, behavior: Any, config: ServerConfig | None = None, **channel: Any) -> AsyncIterator[Any]:
    """The client's function for the method of a `one_method` server."""
    async with (
        one_method(arity, behavior, config) as server,
        open_channel(server.address, access=ACCESS, **channel) as opened,
    ):
        yield getattr(opened, arity)(METHOD)
