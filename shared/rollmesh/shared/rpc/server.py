"""`RpcServer`: the gRPC server of every service.

Interceptors around each call, outermost first: trace, metrics (if they are on), token, errors, streams, deadline,
decoding. Health (grpc.health.v1) and reflection (v1, v1alpha) are always served. By default the server binds to
loopback and requires the run's token. On other addresses it also requires TLS.

    async with RpcServer(ServerConfig(), access=access) as server:
        server.add(run_pb2_grpc.add_RunServiceServicer_to_server, servicer)
        await server.start()          # server.address is now host:port
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import _async as health_aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Settings
from rollmesh.shared.errors import AddressTaken, ConfigError, MeshError
from rollmesh.shared.net.ports import is_taken, owner_of
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.addresses import advertised, require_local
from rollmesh.shared.rpc.auth_interceptor import AuthInterceptor
from rollmesh.shared.rpc.deadline_interceptor import DeadlineInterceptor
from rollmesh.shared.rpc.decode_interceptor import DecodeInterceptor
from rollmesh.shared.rpc.error_interceptor import ErrorInterceptor
from rollmesh.shared.rpc.heap import HeapTrimmer, reuse_freed_memory
from rollmesh.shared.rpc.limits import MESSAGE_BYTES_MAX, RequestLimits
from rollmesh.shared.rpc.metrics_interceptor import MetricsInterceptor
from rollmesh.shared.rpc.reflection import add_reflection
from rollmesh.shared.rpc.stream_interceptor import StreamInterceptor
from rollmesh.shared.rpc.trace_interceptor import TraceInterceptor
from rollmesh.shared.telemetry import metrics

_UNREQUESTED_S_MAX = 3600
"""Longest time that a request waits for this process to take it, in seconds; the deadline of its client is shorter."""


class ServerConfig(Settings):
    """Address and limits of a gRPC server."""

    address: str = "127.0.0.1:0"
    """host:port or unix:PATH. Port 0 takes a free one. Any address except loopback needs TLS."""
    advertise: str = ""
    """Host that is advertised to clients; empty means the host of `address`. Required if that is 0.0.0.0 or [::]."""
    message_bytes_max: PositiveInt = MESSAGE_BYTES_MAX
    """Maximum size of a message in each direction, in bytes. Bulk data is sent in chunks of 1-2 MiB, because gRPC is
    several times slower above 4 MiB."""
    concurrent_rpcs_max: PositiveInt = 4096
    """Maximum number of calls in progress, including streams; more are rejected with RESOURCE_EXHAUSTED."""
    streams_max: PositiveInt = 3072
    """Maximum number of streams in progress; more are rejected with RESOURCE_EXHAUSTED. A value below
    `concurrent_rpcs_max` leaves capacity for short calls."""
    connection_rpcs_max: PositiveInt = 1024
    """Maximum number of calls in progress on one connection. Further calls wait in the client, so that one client
    cannot exhaust the server."""
    deadline_s: PositiveFloat = 60.0
    """Timeout of a unary call whose client set no deadline, in seconds."""
    keepalive_s: PositiveFloat = 20.0
    """Seconds without data after which the peer is pinged. A crashed peer is detected 10 s later."""
    stop_s: NonNegativeFloat = 2.0
    """Time that calls in progress have when the server stops, in seconds; then they are cancelled."""
    removed = {"direct": "every call uses gRPC"}


class RpcServer:
    """A gRPC server with the mesh's interceptors. Leaving the context stops it."""

    def __init__(self, config: ServerConfig | None = None, *, access: Access) -> None:
        """Only `access` with TLS allows an address other than loopback. ConfigError if one of its files cannot be
        read."""
        self._config = config or ServerConfig()
        # The file system protects a unix socket, and a certificate has no name for it.
        local_socket = self._config.address.startswith("unix:")
        self._credentials = None if local_socket else access.server_credentials()
        self._limits: dict[str, RequestLimits] = {}
        reuse_freed_memory()
        self._heap = HeapTrimmer()
        interceptors = [
            TraceInterceptor(),
            *([MetricsInterceptor()] if metrics.is_on() else []),
            AuthInterceptor(access.token),
            ErrorInterceptor(),
            StreamInterceptor(self._config.streams_max),
            DeadlineInterceptor(self._config.deadline_s),
            DecodeInterceptor(self._limits, self._heap.received),
        ]
        self._server = grpc.aio.server(
            interceptors=interceptors,
            options=_options(self._config),
            maximum_concurrent_rpcs=self._config.concurrent_rpcs_max,
        )
        self._health = health_aio.HealthServicer()
        self._service_names: list[str] = []
        self._port = 0

    def add(
        self, add_to_server: Callable[[Any, Any], None], servicer: object, *, limits: RequestLimits | None = None
    ) -> None:
        """Serve `servicer`; `add_to_server` is the generated `add_<Service>Servicer_to_server`. Call it before `start`.

        `limits` are those of its requests, beyond the size of a message.
        """
        known = len(self._service_names)
        add_to_server(servicer, _Recorder(self._server, self._service_names))
        if limits is not None:
            self._limits |= dict.fromkeys(self._service_names[known:], limits)

    async def start(self) -> int:
        """Bind, serve, and return the port (0 for a unix socket). Raises `ConfigError` or `AddressTaken` if it cannot
        bind."""
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        add_reflection(self._server, [*self._service_names, "grpc.health.v1.Health"])
        self._port = self._bind()
        await self._server.start()
        await self.set_serving(True)
        return self._port

    async def set_serving(self, serving: bool) -> None:
        """Set the status that health checks return, for the server and each of its services."""
        states = health_pb2.HealthCheckResponse
        for name in ("", *self._service_names):
            await self._health.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def stop(self, grace_s: float | None = None) -> None:
        """Reject new calls, wait up to `grace_s` (default `stop_s`) for calls in progress, then cancel them.
        Idempotent."""
        grace_s = self._config.stop_s if grace_s is None else grace_s
        self._heap.close()
        await self._health.enter_graceful_shutdown()
        # The wait has a separate limit, because a handler that ignores its cancellation must not block the process.
        async with asyncio.timeout(grace_s + 5.0):
            await self._server.stop(grace_s)

    @property
    def port(self) -> int:
        """The bound port; 0 before `start`."""
        return self._port

    @property
    def address(self) -> str:
        """Address for clients: host:port (the advertised host) or unix:PATH."""
        return advertised(self._config.address, self._config.advertise, self._port)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _bind(self) -> int:
        address = self._config.address
        if self._credentials is None:
            require_local(address)
        advertised(address, self._config.advertise, 0)
        try:
            if self._credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, self._credentials)
        except RuntimeError as err:
            raise _unbindable(address) from err


def _unbindable(address: str) -> MeshError:
    """Return the error for an address on which the server cannot listen now."""
    host, _, port = address.rpartition(":")
    try:
        taken = not address.startswith("unix:") and is_taken(host.strip("[]"), int(port))
    except (OSError, ValueError):
        taken = False
    if taken:
        return AddressTaken(
            f"cannot listen on {address}: {owner_of(int(port))} has the port; stop it, or use another port (0 takes a "
            "free one)",
            address=address,
        )
    return ConfigError(
        f"cannot listen on {address}: the address is not this machine's; use one that is", address=address
    )


class _Recorder:
    """Replaces the server in generated code and records the names of the added services."""

    def __init__(self, server: grpc.aio.Server, service_names: list[str]) -> None:
        self._server = server
        self._service_names = service_names

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._service_names += [handler.service_name() for handler in handlers]
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, handlers: Any) -> None:
        """Ignore registered methods, because they would bypass the generic handlers; grpc.aio ignores them too."""


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    keepalive_ms = int(config.keepalive_s * 1000)
    return [
        # With port sharing, a second server on a used port would start without an error and get half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", config.connection_rpcs_max),
        ("grpc.max_send_message_length", config.message_bytes_max),
        ("grpc.max_receive_message_length", config.message_bytes_max),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Clients may ping at the interval of the mesh's clients, also without calls; the default allows one ping in 5
        # minutes.
        ("grpc.http2.min_ping_interval_without_data_ms", min(keepalive_ms, 5_000)),
        ("grpc.keepalive_permit_without_calls", 1),
        # gRPC cancels a request that the process has not taken for this time, 30 s by default, for example while it
        # imports libraries on a busy host. The client would get CANCELLED before its deadline.
        ("grpc.server_max_unrequested_time_in_server", _UNREQUESTED_S_MAX),
    ]
