"""Configuration of the live page."""

from __future__ import annotations

from typing import Literal

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Settings
from rollmesh.shared.rpc.addresses import host_of, is_wildcard, port_of

ANY_LOOPBACK_PORT = "127.0.0.1:0"


class PageConfig(Settings):
    """Settings of the page that a gateway serves to browsers. Docs: docs/live_page.md."""

    serve: Literal["auto", "always", "never"] = "auto"
    """Whether the gateway serves the page. `auto`: if its libraries are installed (`pip install 'rollmesh[openai]'`),
    and `address` is set or the gateway listens on loopback. `always`: the gateway does not start if it cannot serve the
    page."""
    address: str = ANY_LOOPBACK_PORT
    """host:port to listen on. Port 0: a free port, which the run keeps. Any host except loopback needs `security` with
    certificates and a token file. With certificates the page uses HTTPS."""
    advertise: str = ""
    """Host in the printed URL. Empty: that of `address`. Required for 0.0.0.0 and ::."""
    client_certificates: bool = False
    """Whether browsers need a certificate of the authority `security.ca`, in addition to the token."""
    streams_max: PositiveInt = 32
    """Maximum number of open pages. Each has one stream of updates."""
    refresh_s: PositiveFloat = 1.0
    """Shortest time between two updates of a page, in seconds. The mesh is read only while a page is open."""
    send_s_max: PositiveFloat = 30.0
    """A browser that does not receive an update within this time is disconnected, in seconds. It reconnects when it
    can."""
    session_s: PositiveFloat = 43200.0
    """Time for which a browser stays logged in, in seconds."""
    audit_every_s: NonNegativeFloat = 300.0
    """Shortest time between two audits of a run for the page, in seconds. An audit reads the whole ledger in a separate
    process. 0: the page has no audit."""
    audit_s_max: PositiveFloat = 120.0
    """Time limit of such an audit, in seconds."""

    def check_fields(self) -> None:
        host, port = host_of(self.address), self.address.rpartition(":")[2]
        if not host or not port.isdecimal() or port_of(self.address) > 65535:
            raise ValueError(f"`address` must be host:port, got {self.address!r}")
        if is_wildcard(host) and not self.advertise and self.serve != "never":
            raise ValueError(
                f"`advertise` must name the host by which browsers reach this one, because address is {self.address}"
            )
