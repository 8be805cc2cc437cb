"""The live page of one gateway: it listens from the start, and loads the HTTP server with the first connection.

A gateway whose page is not used therefore has the cost of one listening socket.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import socket
from pathlib import Path
from typing import Any

from rollmesh.services.gateway.page.audits import Audits
from rollmesh.services.gateway.page.config import ANY_LOOPBACK_PORT, PageConfig
from rollmesh.services.gateway.page.feed import Feed
from rollmesh.services.gateway.page.login import PageLogin
from rollmesh.services.gateway.page.parts import PageParts
from rollmesh.services.gateway.page.transcripts import Transcripts
from rollmesh.shared.bus.bus import Bus
from rollmesh.shared.clock import Clock
from rollmesh.shared.config.extras import libraries_needed
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.net.asgi_server import AsgiServer, bind_http
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.addresses import advertised, host_of, is_loopback, require_local
from rollmesh.v1 import coordinator_pb2_grpc, run_pb2_grpc

_LIBRARIES = ("starlette", "uvicorn")
_log = logging.getLogger(__name__)


def is_served(config: PageConfig, *, local: bool) -> bool:
    """Return whether a gateway serves the page. `local`: the gateway listens on loopback."""
    if config.serve != "auto":
        return config.serve == "always"
    wanted = local or config.address != ANY_LOOPBACK_PORT
    return wanted and all(importlib.util.find_spec(name) is not None for name in _LIBRARIES)


def page_url(config: PageConfig, port: int, *, secure: bool) -> str:
    """Return the URL of a page that listens on `port`. Raise ConfigError if browsers cannot call its address."""
    return f"{'https' if secure else 'http'}://{advertised(config.address, config.advertise, port)}/"


def listen_http(address: str, *, unread_s_max: float) -> socket.socket:
    """Return a listener. Its connections end when a client does not receive what was sent within `unread_s_max`
    seconds.

    Otherwise a connection that the server has closed stays open while its client does not read. Raise ConfigError as
    `bind_http`.
    """
    listener = bind_http(address, "gateway.page.address")
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1000 * unread_s_max)))
    return listener


class LivePage:
    """The page of one gateway. `start` and `close` it with the node."""

    def __init__(
        self,
        config: PageConfig,
        *,
        access: Access,
        run: run_pb2_grpc.RunServiceAsyncStub,
        coordinator: coordinator_pb2_grpc.CoordinatorServiceAsyncStub,
        bus: Bus,
        folder: Path,
        parts: PageParts,
        call_s: float,
        clock: Clock,
    ) -> None:
        """`folder` is that of the gateway."""
        self._config = config
        self._access = access
        self._parts = parts
        self._clock = clock
        self.feed = Feed(run, coordinator, bus, refresh_s=config.refresh_s, call_s=call_s, clock=clock)
        self.audits = Audits(
            parts.auditor, folder=folder, every_s=config.audit_every_s, clock=clock, moved=self.feed.note_audit
        )
        self._transcripts = Transcripts(bus, parts)
        self._listener: socket.socket | None = None
        self._starting: asyncio.Task[None] | None = None
        self._server: AsgiServer | None = None
        self._app: Any = None
        self.url = ""
        """Address of the page; empty until it listens."""

    def start(self) -> None:
        """Listen. Raise ConfigError if the address cannot be used, or if a library is missing and the page must be
        served."""
        if self._config.serve == "always":
            with libraries_needed("the live page (gateway.page)"):
                for name in _LIBRARIES:
                    importlib.import_module(name)
        if self._access.tls is None:
            require_local(self._config.address)
        listener = listen_http(self._config.address, unread_s_max=self._config.send_s_max)
        try:
            port = listener.getsockname()[1]
            self.url = page_url(self._config, port, secure=self._access.tls is not None)
        except ConfigError:
            listener.close()
            raise
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._connected)
        _log.info("live page: url=%s local=%s", self.url, is_loopback(host_of(self._config.address)))

    async def close(self) -> None:
        """Stop the server, the readers and the audits."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self._app is not None:
            self._app.closing.set()
        if self._server is not None:
            await self._server.close()
        if self._listener is not None:
            if self._starting is None:
                asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        await self.audits.close()
        await self.feed.close()

    def _connected(self) -> None:
        """Start the server, which accepts the connection that is waiting."""
        assert self._listener is not None
        asyncio.get_running_loop().remove_reader(self._listener)
        self._starting = asyncio.create_task(self._serve(self._listener), name="live page")
        self._starting.add_done_callback(_log_failure)

    async def _serve(self, listener: socket.socket) -> None:
        for name in ("uvicorn.config", "rollmesh.services.gateway.page.app"):  # a second of imports on a busy host
            await asyncio.to_thread(importlib.import_module, name)
        from rollmesh.services.gateway.page.app import PageApp

        config = self._config
        login = PageLogin(self._access.token, session_s=config.session_s, clock=self._clock)
        self._app = PageApp(
            config,
            login,
            self.feed,
            self._transcripts,
            self.audits,
            self._parts,
            secure=self._access.tls is not None,
        )
        self._server = await AsgiServer.start(
            self._app.asgi(), listener, tls=self._access.tls, client_certificates=config.client_certificates
        )


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("the live page has stopped: error=%s: %s", type(error).__name__, error)
