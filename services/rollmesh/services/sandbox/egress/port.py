"""One session's egress port: an inherited socket over which it receives connections that the service creates.

The session never creates a socket: it sends a packet and receives a connected descriptor, or a text with the reason of
the refusal. A jail with egress therefore has the same system calls and the same empty network namespace as one without.
The service identifies a session by its port and not by what it sends. A session can hold `connections_max` connections
and get `requests_max` of them in total.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress

from rollmesh.services.sandbox.egress.connection import Connection
from rollmesh.services.sandbox.egress.exchange import EgressRefused
from rollmesh.services.sandbox.egress.proxy import EgressClient, Proxy
from rollmesh.shared.telemetry.logs import apart

_log = logging.getLogger(__name__)
_PACKET_BYTES = 64
GRANTED, DENIED = b"+", b"-"


class Port:
    """The service's end of a port. `theirs` is for the session; the caller closes it after passing it on. End with
    `close`."""

    def __init__(self, proxy: Proxy, client: EgressClient) -> None:
        self._proxy = proxy
        self._client = client
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._left = proxy.config.requests_max
        self._connections: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._serve(), name="egress port", context=apart())
        self._task.add_done_callback(lambda _: self._ours.close())

    def close(self) -> None:
        """Close the port and cancel requests in progress without a reply."""
        self._task.cancel()
        for task in self._connections:
            task.cancel()
        self.theirs.close()

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while await loop.sock_recv(self._ours, _PACKET_BYTES):
                if self._left <= 0:
                    self._deny("requests", f"the session has made its {self._proxy.config.requests_max} requests")
                    return
                if len(self._connections) >= self._proxy.config.connections_max:
                    self._deny("requests", f"{self._proxy.config.connections_max} requests are in progress already")
                    self._left -= 1
                    continue
                self._connect()
        except OSError as error:  # the session has ended, or does not read its connections
            _log.debug("the port of %s ended: %s", self._client.session, error)

    def _connect(self) -> None:
        """Pass a new connection to the session. Raises OSError if the session does not receive it."""
        self._left -= 1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                socket.send_fds(self._ours, [GRANTED], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        connection = Connection(ours, self._proxy.config)
        task = asyncio.create_task(self._handle(connection), name="egress connection")
        self._connections.add(task)
        task.add_done_callback(lambda done: self._finish(done, connection))

    def _finish(self, task: asyncio.Task[None], connection: Connection) -> None:
        self._connections.discard(task)
        connection.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a request of session %s failed", self._client.session, exc_info=error)

    def _deny(self, rule: str, why: str) -> None:
        reply = self._proxy.refuse(self._client, EgressRefused(rule, why))
        self._ours.send(DENIED + reply.body)

    async def _handle(self, connection: Connection) -> None:
        with suppress(OSError, TimeoutError):  # the session has ended or does not read
            try:
                request = await connection.read()
            except EgressRefused as error:
                await connection.write(self._proxy.refuse(self._client, error))
                return
            if request is not None:
                async with self._proxy.answering(self._client, request) as reply:
                    await connection.write(reply)
