"""Serve an ASGI application with uvicorn on the event loop of the caller, on a listener that is bound before.

It leaves the signals of the process alone. Clients that send or read nothing cannot hold connections, and connections
cannot use all files of the process. Requests whose end is ambiguous are rejected (RFC 9112), because a proxy could read
another request in them. uvicorn and h11 are imported when the server starts, not with this module.
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rollmesh.shared.errors import ConfigError, Internal

_KEEP_ALIVE_S = 75
"""Longer than the pools of clients keep an idle connection, so that they do not use one that is being closed."""
_HEADERS_S_MAX = 15.0
"""Limit of the time from the begin of a connection, or the first byte of a later request, until all headers are
there."""
_BODY_S_MAX = 60.0
"""Limit of the time from the headers of a request until all of its body is there."""
_LINGER_S = 2.0
"""Time in which the rest of a body is discarded after a reply that did not wait for it, so that the client can read the
reply."""
_UNREAD_S_MAX = 60.0
"""Limit of the time in which a client reads the last reply of its connection."""
_STOP_S_MAX = 5.0
_QUEUE_MAX = 1024
"""Number of connections that wait in the kernel."""
_ACCEPTED_MAX = 16
"""Number of connections that are accepted in one turn of the loop. A burst of them must not stop the other work of the
process."""
_FRAMING_HEADERS = (b"content-length", b"transfer-encoding")
_BLANK_LINE = re.compile(rb"\n\r?\n")
_BARE_LF = re.compile(rb"(?<!\r)\n")


class TlsFiles(Protocol):
    """Paths of the files that a server with TLS reads."""

    @property
    def certificate(self) -> Any: ...
    @property
    def key(self) -> Any: ...
    @property
    def ca(self) -> Any: ...


def connections_max() -> int:
    """Return the largest number of connections: half of the files that the process may open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def bind_http(address: str, key: str) -> socket.socket:
    """Return a listener on host:port. Raise ConfigError that names the setting `key` if the address cannot be listened
    on."""
    try:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, int(port)), family=family, backlog=_QUEUE_MAX)
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
        cls,
        app: Any,
        listener: socket.socket,
        *,
        tls: TlsFiles | None = None,
        client_certificates: bool = False,
        num_max: int | None = None,
    ) -> AsgiServer:
        """Return once the server responds. `client_certificates`: clients need a certificate of the authority of `tls`.
        `num_max` connections, by default `connections_max`.

        Raise Internal if the server ends while it starts. The listener is then closed.
        """
        import h11
        import uvicorn
        from h11._receivebuffer import ReceiveBuffer
        from uvicorn.protocols.http.h11_impl import H11Protocol

        most = connections_max() if num_max is None else num_max

        class StrictBuffer(ReceiveBuffer):
            """Rejects headers whose message another parser may end elsewhere."""

            def maybe_extract_lines(self) -> list[bytearray] | None:
                end = _BLANK_LINE.search(self._data, self._multiple_lines_search)
                if self._data[:1] == b"\n" or (end and _BARE_LF.search(self._data, 0, end.end())):
                    raise h11.RemoteProtocolError("a line must end with CR LF")
                lines = super().maybe_extract_lines()
                headers = [bytes(line).lower().partition(b":") for line in lines or ()]
                framing = [value for name, _, value in headers if name in _FRAMING_HEADERS]
                if len(framing) > 1 or any(b"," in value for value in framing):
                    raise h11.RemoteProtocolError("a request must have one Content-Length or one Transfer-Encoding")
                return lines

        class LimitedProtocol(H11Protocol):
            """Closes a connection on which no whole request arrives in time, and one beyond the largest number."""

            _phase = ""
            """What is waited for; empty while the application replies."""
            _limit: asyncio.TimerHandle | None = None

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
                super().connection_made(transport)
                self.conn._receive_buffer = StrictBuffer()
                self._enter("headers", _HEADERS_S_MAX)
                if len(self.connections) > most:
                    transport.abort()

            def handle_events(self) -> None:
                super().handle_events()
                state = self.conn.their_state
                if self.transport.is_closing():
                    self._enter("closing", _UNREAD_S_MAX)
                elif state is h11.SEND_BODY:
                    self._enter("body", _BODY_S_MAX)
                elif state is not h11.IDLE:
                    self._enter("")
                elif self.conn._receive_buffer:
                    self._enter("headers", _HEADERS_S_MAX)
                elif self.cycle is not None:
                    self._enter("idle", _KEEP_ALIVE_S)

            def on_response_complete(self) -> None:
                super().on_response_complete()
                if self.transport.is_closing():
                    self._enter("closing", _UNREAD_S_MAX)
                elif self.conn.their_state is h11.SEND_BODY:
                    self._enter("discarded", _LINGER_S)

            def connection_lost(self, exc: Exception | None) -> None:
                super().connection_lost(exc)
                self._enter("")

            def _enter(self, phase: str, limit_s: float | None = None) -> None:
                """Close the connection `limit_s` after the begin of this phase, unless another one begins."""
                if phase == self._phase or (phase == "body" and self._phase == "discarded"):
                    return
                if self._limit is not None:
                    self._limit.cancel()
                self._phase, self._limit = phase, None
                if limit_s is not None:
                    self._limit = self.loop.call_later(limit_s, self._close_late)

            def _close_late(self) -> None:
                if self.transport.get_write_buffer_size():  # the client does not read
                    self.transport.abort()
                else:
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
                interface="asgi3",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_ACCEPTED_MAX,
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
            listener.listen(_QUEUE_MAX)  # asyncio has set it to the number that it accepts in one turn
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
