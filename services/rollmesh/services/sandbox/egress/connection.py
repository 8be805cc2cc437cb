"""One connection of a session: HTTP/1.1 with h11, one request, one reply, closed. The received data is hostile.

The session must send the whole request within the policy's `request_s` and read the whole reply within it. A slow
session occupies one of its connections and nothing else. Bytes after the first request are refused, so there is no
pipelining.
"""

from __future__ import annotations

import asyncio
import http
import socket

import h11

from rollmesh.services.sandbox.egress.config import EgressConfig
from rollmesh.services.sandbox.egress.exchange import EgressRefused, EgressReply, EgressRequest, wire

_PIECE_BYTES = 1 << 16


class Connection:
    """The proxy's end of a connection. Always call `close` at the end."""

    def __init__(self, connection: socket.socket, config: EgressConfig) -> None:
        self._socket = connection
        self._config = config
        self._link = h11.Connection(h11.SERVER, max_incomplete_event_size=config.header_bytes_max)
        self._loop = asyncio.get_running_loop()
        self._is_head = False

    async def read(self) -> EgressRequest | None:
        """Return the request; None if the session closed the connection without one. Raises EgressRefused, OSError."""
        try:
            async with asyncio.timeout(self._config.request_s):
                return await self._read()
        except TimeoutError:
            raise EgressRefused("slow", f"the request was not complete after {self._config.request_s:g} s") from None
        except h11.RemoteProtocolError as error:
            rule = "header_bytes" if error.error_status_hint == 431 else "malformed"
            raise EgressRefused(rule, f"invalid HTTP/1.1: {error}") from error

    async def write(self, reply: EgressReply) -> None:
        """Send the reply. Raises OSError, TimeoutError."""
        body = b"" if self._is_head or reply.status in (204, 304) else reply.body
        data = _encoded(reply.status, {**reply.headers, "content-length": str(len(body)), "connection": "close"}, body)
        async with asyncio.timeout(self._config.request_s):
            await self._loop.sock_sendall(self._socket, data)

    def close(self) -> None:
        """Close the socket. No call may be waiting on it."""
        self._socket.close()

    async def _read(self) -> EgressRequest | None:
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = self._link.next_event()
            if event is h11.NEED_DATA:
                self._link.receive_data(await self._loop.sock_recv(self._socket, _PIECE_BYTES))
            elif isinstance(event, h11.Request):
                head = event
                self._check_head(event)
            elif isinstance(event, h11.Data):
                body += event.data
                self._check_size(len(body))
            elif isinstance(event, h11.ConnectionClosed):
                return None
            else:
                assert head is not None  # the end of a message, or PAUSED after it, follows a head
                return self._whole(head, bytes(body))

    def _check_head(self, head: h11.Request) -> None:
        self._is_head = head.method == b"HEAD"
        if head.method == b"CONNECT":
            raise EgressRefused(
                "connect", "there are no tunnels; request https URLs directly, the proxy terminates TLS itself"
            )
        if self._link.they_are_waiting_for_100_continue:
            raise EgressRefused("malformed", "Expect is not supported; send the body at once")
        for name, value in head.headers:
            if name == b"content-length":
                self._check_size(int(value))

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._config.request_bytes_max:
            raise EgressRefused("request_bytes", f"the body exceeds {self._config.request_bytes_max} bytes")

    def _whole(self, head: h11.Request, body: bytes) -> EgressRequest:
        if self._link.trailing_data[0]:
            raise EgressRefused("malformed", "bytes follow the request; send one request per connection")
        headers = {name.decode("ascii"): value.decode("latin-1") for name, value in head.headers}
        return EgressRequest(method=head.method.decode(), target=head.target.decode(), headers=headers, body=body)


def _encoded(status: int, headers: dict[str, str], body: bytes) -> bytes:
    """Encode the reply. A new parser is used, so that a reply to an invalid request can also be encoded."""
    link = h11.Connection(h11.SERVER)
    reason = http.HTTPStatus(status).phrase if status in set(http.HTTPStatus) else ""
    head = h11.Response(status_code=status, headers=wire(headers), reason=reason.encode())
    parts = [link.send(head), link.send(h11.Data(data=body)) if body else b"", link.send(h11.EndOfMessage())]
    return b"".join(part or b"" for part in parts)
