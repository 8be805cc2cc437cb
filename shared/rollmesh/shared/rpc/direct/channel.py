"""`DirectChannel`: a channel whose calls skip the socket if the server at its address runs on the same event loop.

Each call looks the server up when it begins. Without a server there, because it is in another process, in another thread, or stopped, the
call goes through gRPC. A stream stays on the transport on which it began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

import grpc

from rollmesh.shared.rpc.direct.calls import (
    DirectCall,
    DirectStreamStreamCall,
    DirectStreamUnaryCall,
    DirectUnaryStreamCall,
    DirectUnaryUnaryCall,
)
from rollmesh.shared.rpc.direct.rpc import DirectRpc
from rollmesh.shared.rpc.direct.server import DirectServer, servers_here

_CLOSED = "Channel closed."
Coder = Callable[[Any], Any] | None


class DirectChannel(grpc.aio.Channel):
    """A channel to `address`. `connect` opens the channel for calls that need the socket."""

    def __init__(self, address: str, connect: Callable[[], grpc.aio.Channel], message_bytes_max: int) -> None:
        self._address = address
        self._connect = connect
        self._message_bytes_max = message_bytes_max
        self._socket: grpc.aio.Channel | None = None
        self._servers: dict[str, DirectServer] | None = None
        self._closed = False
        self._open: set[DirectRpc] = set()
        self._waiting: dict[DirectRpc, DirectServer] = {}
        """Calls beyond the server's limit for a connection, in order. They are not served before another call ends."""
        self._starting = False
        """Whether waiting calls are being started."""

    def unary_unary(self, method: str, *coders: Any, **options: Any) -> Any:
        return self._callable("unary_unary", DirectUnaryUnaryCall, method, *coders, **options)

    def unary_stream(self, method: str, *coders: Any, **options: Any) -> Any:
        return self._callable("unary_stream", DirectUnaryStreamCall, method, *coders, **options)

    def stream_unary(self, method: str, *coders: Any, **options: Any) -> Any:
        return self._callable("stream_unary", DirectStreamUnaryCall, method, *coders, **options)

    def stream_stream(self, method: str, *coders: Any, **options: Any) -> Any:
        return self._callable("stream_stream", DirectStreamStreamCall, method, *coders, **options)

    def _callable(
        self,
        arity: str,
        make: type[DirectCall],
        method: str,
        request_serializer: Coder = None,
        response_deserializer: Coder = None,
        _registered_method: bool | None = None,
    ) -> Callable[..., Any]:
        remote: Callable[..., Any] | None = None

        def invoke(request: Any = None, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
            nonlocal remote
            server = self._server()
            if server is None:
                if remote is None:
                    remote = getattr(self._over_socket(), arity)(method, request_serializer, response_deserializer)
                return remote(request, timeout=timeout, metadata=metadata, **options)
            limits = (self._message_bytes_max, server.message_bytes_max)
            rpc = DirectRpc(method, tuple(metadata or ()), timeout, limits)
            call = make(rpc, request_serializer, response_deserializer)
            call.send(request)
            self._start(server, rpc)
            return call

        return invoke

    def _server(self) -> DirectServer | None:
        if self._closed:
            raise grpc.aio.UsageError("Channel is closed.")
        if self._servers is None:
            self._servers = servers_here()
        return self._servers.get(self._address)

    def _over_socket(self) -> grpc.aio.Channel:
        if self._socket is None:
            self._socket = self._connect()
        return self._socket

    def _start(self, server: DirectServer, rpc: DirectRpc) -> None:
        if len(self._open) < server.channel_rpcs_max:
            self._serve(server, rpc)
        else:
            self._waiting[rpc] = server
            rpc.on_finish(lambda: self._waiting.pop(rpc, None))

    def _serve(self, server: DirectServer, rpc: DirectRpc) -> None:
        self._open.add(rpc)
        rpc.on_finish(lambda: self._finished(rpc))
        server.serve(rpc)

    def _finished(self, rpc: DirectRpc) -> None:
        self._open.discard(rpc)
        if self._starting:  # a server that has stopped rejects a call at once
            return
        self._starting = True
        try:
            while self._waiting:
                waiting, server = next(iter(self._waiting.items()))
                if len(self._open) >= server.channel_rpcs_max:
                    break
                del self._waiting[waiting]
                self._serve(server, waiting)
        finally:
            self._starting = False

    async def close(self, grace: float | None = None) -> None:
        """Wait up to `grace` seconds for calls in progress, then cancel them. Later calls raise UsageError."""
        self._closed = True
        running = [rpc.finished() for rpc in self._open]
        if grace and running:
            await asyncio.wait(running, timeout=grace)
        for rpc in [*self._waiting, *self._open]:
            rpc.cancel(_CLOSED)
        if self._socket is not None:
            await self._socket.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return READY if the server is on this event loop, else the state of the connection."""
        if not self._closed and self._server() is not None:
            return grpc.ChannelConnectivity.READY
        return self._over_socket().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait until the connection has another state. A server on this event loop has no connection, and no change is reported."""
        await self._over_socket().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        if self._server() is None:
            await self._over_socket().channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
