"""The session's side of egress: HTTP over connections that the service's proxy hands out through one inherited descriptor.

Runs inside the jail, where socket() is refused: a packet on the port asks for a connection, the answer carries it. One request
per connection, so that one that was interrupted spoils no other. Nothing here protects anything: the rules live in the proxy.
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
    """The proxy refused, or there is none. The text says why."""


@dataclass(frozen=True, slots=True)
class EgressResponse:
    """An HTTP answer."""

    status: int
    headers: Mapping[str, str]
    """Lower-case names."""
    body: bytes


def ask(
    target: str, *, method: str = "GET", body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> EgressResponse:
    """Send one request: an absolute URL for the outside, a path for the proxy's own services. Raises EgressError if it is refused."""
    link = _ProxyConnection("proxy")
    try:
        with suppress(BrokenPipeError):  # refused before it was sent: the answer is there
            link.request(method, target, body, dict(headers or {}))
        got = link.getresponse()
        answer = EgressResponse(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())
    except http.client.HTTPException as error:
        raise EgressError(f"the proxy broke off: {error!r}") from error
    finally:
        link.close()
    if "x-refused-by" in answer.headers:
        raise EgressError(answer.body.decode(errors="replace").strip())
    return answer


def connect() -> socket.socket:
    """A fresh connection to the proxy. Raises EgressError."""
    with _port() as port:
        try:
            port.send(b"c")
            said, fds, _, _ = socket.recv_fds(port, _DENIAL_BYTES_MAX, 1)
        except (BrokenPipeError, ConnectionResetError):
            said, fds = b"", []
    if not fds:
        raise EgressError(said[1:].decode(errors="replace").strip() or "the session's egress has ended")
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
