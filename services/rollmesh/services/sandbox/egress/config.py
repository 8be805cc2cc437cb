"""Settings of egress: named policies, each an allow-list with limits."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from rollmesh.services.sandbox.egress.retrieval_config import CacheConfig, RetrievalConfig
from rollmesh.shared.config.settings import FIXED, NonNegativeInt, PositiveFloat, PositiveInt, Settings

_HOST = re.compile(r"\.?(?!-)[a-z0-9-]+(\.[a-z0-9-]+)*")
_METHOD = re.compile(r"[A-Z]+")
SECRET_HEADER = re.compile(r"[A-Za-z0-9-]+")
PORTS = {"http": 80, "https": 443}
"""Supported schemes and their default ports."""


class EgressRule(Settings):
    """One rule of an allow-list. A request is allowed if any rule allows it. There are no deny rules."""

    host: str
    """`example.org` allows that host alone; `.example.org` allows every host below it but not itself. Lower case; never
    an address."""
    schemes: tuple[str, ...] = ("https",)
    """Allowed schemes, `https` and `http`. The proxy itself terminates TLS and checks the certificate; there are no
    tunnels."""
    ports: tuple[Annotated[int, Meta(ge=1, le=65_535)], ...] = ()
    """Allowed ports. If empty, the default port of the scheme."""
    methods: tuple[str, ...] = ("GET", "HEAD")
    """Allowed methods. Methods other than GET and HEAD can change external state and carry data out of a session."""
    path_prefix: Annotated[str, Meta(pattern="^/")] = "/"
    """Allowed path and the paths below it, by whole segments: `/wiki` allows `/wiki` and `/wiki/x`, but not
    `/wikis`."""
    allow_private: bool = False
    """Whether the host may resolve to a loopback or private address, e.g. of an internal search server. The proxy never
    connects to link-local addresses (metadata services of clouds)."""
    header_files: dict[str, str] = {}
    """Header -> file with its value, e.g. {Authorization: /etc/keys/search}. The proxy adds it for this rule alone, and
    no session sees it."""

    def check_fields(self) -> None:
        if not _HOST.fullmatch(self.host) or self.host.rpartition(".")[2].isdigit():
            raise ValueError(
                f"`host` must be a lower-case name, or one with a leading dot, and not an address, got {self.host!r}"
            )
        if not self.schemes or any(scheme not in PORTS for scheme in self.schemes):
            raise ValueError(f"`schemes` must name some of {', '.join(PORTS)}, got {self.schemes}")
        if not self.methods or any(not _METHOD.fullmatch(m) or m in ("CONNECT", "TRACE") for m in self.methods):
            raise ValueError(f"`methods` must be upper-case and neither CONNECT nor TRACE, got {self.methods}")
        if any(not SECRET_HEADER.fullmatch(name) for name in self.header_files):
            raise ValueError(f"`header_files` must be keyed by header names, got {sorted(self.header_files)}")


class EgressConfig(Settings):
    """One policy, to which profiles refer. A request beyond a limit is refused with a text for the session and is never
    an infrastructure failure."""

    rules: Annotated[tuple[EgressRule, ...], FIXED] = ()
    """Allowed requests. If empty, nothing outside is allowed."""
    retrieval: Annotated[RetrievalConfig | None, FIXED] = None
    """Backend of the session's tools `search`, `browse` and `retrieve`. If None, they are refused."""
    cache: CacheConfig = CacheConfig()
    """Whether responses to GET are recorded and replayed."""
    addresses: dict[str, tuple[str, ...]] = {}
    """Fixed addresses by host, instead of DNS, e.g. for internal hosts and for runs that must not depend on DNS. They
    are checked like all others."""
    ca_file: str = ""
    """PEM file of the trusted certificates. If empty, those of the system."""
    requests_max: PositiveInt = 256
    """Maximum number of requests of one session, refused ones included; then it gets no more connections."""
    connections_max: PositiveInt = 4
    """Maximum number of concurrent connections of one session. A connection carries one request."""
    inflight_max: PositiveInt = 64
    """Maximum number of requests in progress for all sessions of this policy; more wait, within `timeout_s`. Each may
    hold `response_bytes_max` bytes of the service's memory, twice that while a body is decompressed."""
    rate_per_s: PositiveFloat = 50.0
    """Requests per second of one tenant on this node."""
    burst: PositiveInt = 100
    """Requests that a tenant may make at once before `rate_per_s` applies."""
    untaken_bytes_max: PositiveInt = 256 << 20
    """Maximum bytes of responses that the sessions of this policy have not read; then further responses are refused.
    Bounds the service's memory."""
    header_bytes_max: PositiveInt = 16 << 10
    """Maximum bytes of a request line with headers, and of response headers."""
    request_bytes_max: PositiveInt = 64 << 10
    """Maximum bytes of a request body."""
    response_bytes_max: PositiveInt = 2 << 20
    """Maximum bytes of a response body, both compressed and decompressed. A larger response is refused, not cut."""
    request_s: PositiveFloat = 10.0
    """Seconds for a session to send a complete request after it gets a connection, and to read a complete response."""
    timeout_s: PositiveFloat = 20.0
    """Seconds for processing a request: waiting, name resolution, connecting, redirects, and the response."""
    redirects_max: NonNegativeInt = 5
    """Maximum number of redirects followed for searches and pages; each is checked like a first request. Plain requests
    get redirects as responses."""

    def check_fields(self) -> None:
        if self.untaken_bytes_max < self.response_bytes_max:
            raise ValueError(
                f"`untaken_bytes_max` must be >= response_bytes_max = {self.response_bytes_max}, got "
                f"{self.untaken_bytes_max}"
            )
