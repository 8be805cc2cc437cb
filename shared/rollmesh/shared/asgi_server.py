"""Serve an ASGI application with uvicorn on the event loop of the caller, on a listener that is bound before.

It leaves the signals of the process alone. Clients that send nothing cannot hold connections, and connections cannot use all files of the
process. uvicorn is imported when the server starts, not with this module.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollmesh.shared.errors import ConfigError, Internal
from rollmesh.shared.rpc.access import Tls
from rollmesh.shared.rpc.addresses import host_of, port_of

_KEEP_ALIVE_S = 75
"""Longer than the pools of clients keep an idle connection, so that they do not use one that is being closed."""
_REQUEST_S_MAX = 15.0
"""Limit of the time from the begin of a connection, or the end of the keep-alive, until the headers of a request are there."""
_STOP_S_MAX = 5.0


def connections_max() -> int:
    """Return the largest number of connections: half of the files that the process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def bind_http(address: str, key: str) -> socket.socket:
    """Return a listener on host:port. Raise ConfigError that names the setting `key` if the address cannot be listened on."""
    try:
        family = socket.AF_INET6 if ":" in host_of(address) else socket.AF_INET
        return socket.create_server((host_of(address), port_of(address)), family=family, backlog=1024)
    except OSError as err:
        raise ConfigError(
            f"{key}: cannot listen on {address}: {err.strerror or err}; use a free port of this machine, or port 0",
            address=address,
        ) from err


class AsgiServer:
    """A running server. Create it with `start`."""

    def __init__(self, server: Any, serving: asyncio.Task[None]) -> None:
        self._server = server
        self._serving = serving

    @classmethod
    async def start(
        cls, app: Any, listener: socket.socket, *, tls: Tls | None = None, client_certificates: bool = False
    ) -> AsgiServer:
        """Return once the server responds. `client_certificates`: clients need a certificate of the authority of `tls`.

        Raise Internal if the server ends while it starts. The listener is then closed.
        """
        import uvicorn
        from uvicorn.protocols.http.h11_impl import H11Protocol

        most = connections_max()

        class LimitedProtocol(H11Protocol):
            """Closes a connection on which no whole request arrives in time, and one beyond the largest number."""

            _waits: asyncio.TimerHandle | None = None

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
                super().connection_made(transport)
                self._wait(_REQUEST_S_MAX)
                if len(self.connections) > most:
                    transport.abort()

            def on_response_complete(self) -> None:
                super().on_response_complete()
                self._wait(_KEEP_ALIVE_S + _REQUEST_S_MAX)

            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                if self._waits is not None:
                    self._waits.cancel()

            def _wait(self, limit_s: float) -> None:
                if self._waits is not None:
                    self._waits.cancel()
                self._waits = self.loop.call_later(limit_s, self._close_idle)

            def _close_idle(self) -> None:
                if self.cycle is None or self.cycle.response_complete:
                    self.transport.close()

        ready = asyncio.Event()

        class EmbeddedHttpServer(uvicorn.Server):
            """Leaves the signals of the process alone, and reports when it listens."""

            @contextmanager
            def capture_signals(self) -> Iterator[None]:
                yield

            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                ready.set()

        secure: dict[str, Any] = {}
        if tls is not None:
            secure = {"ssl_certfile": tls.certificate, "ssl_keyfile": tls.key, "ssl_ca_certs": str(tls.ca)}
            secure["ssl_cert_reqs"] = ssl.CERT_REQUIRED if client_certificates else ssl.CERT_NONE
        server = EmbeddedHttpServer(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=LimitedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
                **secure,
            )
        )
        serving = asyncio.create_task(server.serve([listener]))
        started = asyncio.create_task(ready.wait())
        try:
            await asyncio.wait({serving, started}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.is_set():
                raise Internal(f"the HTTP server on {listener.getsockname()} ended while it started; see the log")
        except BaseException:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            listener.close()
            raise
        finally:
            started.cancel()
        return cls(server, serving)

    @property
    def ended(self) -> bool:
        """Whether the server no longer serves."""
        return self._serving.done()

    async def close(self) -> None:
        """Stop the server. Its connections are closed."""
        self._server.should_exit = True
        _, running = await asyncio.wait({self._serving}, timeout=_STOP_S_MAX)
        if running:
            self._serving.cancel()
            await asyncio.wait(running, timeout=_STOP_S_MAX)
