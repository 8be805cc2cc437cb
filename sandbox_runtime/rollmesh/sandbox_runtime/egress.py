"""The session's side of egress: HTTP over connections that the service's proxy passes through one inherited descriptor.

Runs inside the jail, where socket() is rejected: a packet on the port requests a connection, and the reply carries it.
Each connection carries one request, so that an interrupted request affects no other. This module enforces nothing; the
proxy enforces the rules.
"""

from __future__ import annotations

import http.client
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from rollmesh.sandbox_runtime.contain import EGRESS_FD

_DENIAL_BYTES_MAX = 4096


class EgressError(OSError):
    """The proxy refused the request, or the session has no proxy. The text gives the reason."""


@dataclass(frozen=True, slots=True)
class EgressResponse:
    """An HTTP response."""

    status: int
    headers: Mapping[str, str]
    """Headers by lower-case name."""
    body: bytes


def ask(
    target: str, *, method: str = "GET", body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> EgressResponse:
    """Send one request: an absolute URL for an external server, or a path of the proxy. Raises EgressError if it is
    refused."""
    link = _ProxyConnection("proxy")
    try:
        with suppress(BrokenPipeError):  # refused before it was sent completely; the response is available
            link.request(method, target, body, dict(headers or {}))
        got = link.getresponse()
        answer = EgressResponse(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
    except http.client.HTTPException as error:
        raise EgressError(f"the connection to the proxy failed: {error!r}") from error
    finally:
        link.close()
    if "x-refused-by" in answer.headers:
        raise EgressError(answer.body.decode(errors="replace").strip())
    return answer


def connect() -> socket.socket:
    """Return a new connection to the proxy. Raises EgressError."""
    with _port() as port:
        try:
            port.send(b"c")
            reply, fds, _, _ = socket.recv_fds(port, _DENIAL_BYTES_MAX, 1)
        except (BrokenPipeError, ConnectionResetError):
            reply, fds = b"", []
    if not fds:
        raise EgressError(reply[1:].decode(errors="replace").strip() or "the session's egress has ended")
    return socket.socket(fileno=fds[0])


def _port() -> socket.socket:
    with suppress(OSError):
        if stat.S_ISSOCK(os.fstat(EGRESS_FD).st_mode):
            port = socket.socket(fileno=os.dup(EGRESS_FD))
            if port.type == socket.SOCK_SEQPACKET:
                return port
            port.close()
    raise EgressError("this session has no egress: its profile names no policy")


class _ProxyConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = connect()
