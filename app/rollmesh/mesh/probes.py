"""A gRPC server with grpc.health.v1.Health alone and without TLS, for probes of a scheduler that cannot present a
certificate.

    async with ProbeServer("0.0.0.0:7401", ready=lambda: True):
        ...                            # Check("") is SERVING while the event loop runs; Check("ready") follows `ready`

A process without a server, such as a rollout worker, can be probed in this way too. The response says SERVING or
NOT_SERVING and nothing else, so a caller needs neither a token nor a certificate. Collaborators: `mesh` (starts it),
`NetworkConfig.probes`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.shared.errors import ConfigError

LIVE, READY = "", "ready"
"""Names for Check: the process itself, and whether it takes work."""
CALLS_MAX = 16
_REQUEST_BYTES_MAX = 4096
_STOP_S = 0.5


class ProbeServer:
    """The server, at a fixed address. Use it as an async context manager."""

    def __init__(self, address: str, *, ready: Callable[[], bool]) -> None:
        self._address = address
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", _REQUEST_BYTES_MAX)]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=CALLS_MAX)
        server: Any = self._server
        health_pb2_grpc.add_HealthServicer_to_server(_Health(ready), server)

    async def __aenter__(self) -> Self:
        """Listen. Raises ConfigError if the address is taken, or is not an address of this host."""
        try:
            self._server.add_insecure_port(self._address)
        except RuntimeError as err:
            raise ConfigError(
                f"`network.probes`: cannot listen on {self._address}; name a free port and an address of this host, "
                "one for each process",
                key="network.probes",
            ) from err
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(_STOP_S)


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Check only. Watch stays unimplemented, because a stream of each prober would remain open."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready

    async def Check(self, request: Any, context: Any) -> Any:
        states = health_pb2.HealthCheckResponse
        if request.service not in (LIVE, READY):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"known services: {LIVE!r}, {READY!r}")
        serving = request.service == LIVE or self._ready()
        return states(status=states.SERVING if serving else states.NOT_SERVING)
