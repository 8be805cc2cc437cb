"""Configuration of egress: named policies, each an allow-list with limits."""

from __future__ import annotations

import re

import msgspec

from rollmesh.services.sandbox.egress.retrieval_config import CacheConfig, RetrievalConfig

_HOST = re.compile(r"\.?(?!-)[a-z0-9-]+(\.[a-z0-9-]+)*")
_METHOD = re.compile(r"[A-Z]+")
SECRET_HEADER = re.compile(r"[A-Za-z0-9-]+")
PORTS = {"http": 80, "https": 443}
"""Schemes that are spoken, and their own ports."""


class EgressRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that may be reached. A request is allowed if any rule allows it; there are no rules that deny."""

    host: str
    """`example.org` is that host alone, `.example.org` every host below it and not itself. Lower case; never an address."""
    schemes: tuple[str, ...] = ("https",)
    """`https`, `http`. The proxy speaks TLS itself and checks the certificate: there are no tunnels."""
    ports: tuple[int, ...] = ()
    """Empty means the scheme's own port."""
    methods: tuple[str, ...] = ("GET", "HEAD")
    """Others can change things outside, and carry data out: a host that takes them is a way out for whatever a session knows."""
    path_prefix: str = "/"
    """Paths at or below it, by whole segments: `/wiki` allows `/wiki` and `/wiki/x`, not `/wikis`."""
    allow_private: bool = False
    """Whether the host's name may lead to a loopback or private address, e.g. a search server of one's own. Link-local ones
    (clouds' metadata services) are never connected to."""
    header_files: dict[str, str] = {}
    """Header -> file that holds its value, e.g. {Authorization: /etc/keys/search}. Added here, for this rule alone; no session sees it."""

    def __post_init__(self) -> None:
        if not _HOST.fullmatch(self.host) or self.host.rpartition(".")[2].isdigit():
            raise ValueError(f"host must be a lower-case name, or one with a leading dot; no address: {self.host!r}")
        if not self.schemes or any(scheme not in PORTS for scheme in self.schemes):
            raise ValueError(f"schemes must name some of {', '.join(PORTS)}, got {self.schemes}")
        if any(not 0 < port < 65536 for port in self.ports):
            raise ValueError(f"ports must lie between 1 and 65535, got {self.ports}")
        if not self.methods or any(not _METHOD.fullmatch(m) or m in ("CONNECT", "TRACE") for m in self.methods):
            raise ValueError(f"methods must be upper-case and neither CONNECT nor TRACE, got {self.methods}")
        if not self.path_prefix.startswith("/"):
            raise ValueError(f"path_prefix must begin with '/', got {self.path_prefix!r}")
        if any(not SECRET_HEADER.fullmatch(name) for name in self.header_files):
            raise ValueError(f"header_files must be keyed by header names, got {sorted(self.header_files)}")


class EgressConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One policy, named by profiles. Limits are refusals in clear text to the session, never an infra failure."""

    rules: tuple[EgressRule, ...] = ()
    """What may be reached. None: nothing outside."""
    retrieval: RetrievalConfig | None = None
    """What the session's tools `search`, `browse` and `retrieve` work on; None: they are refused."""
    cache: CacheConfig = CacheConfig()
    """Whether answers to GET are kept, and replayed."""
    addresses: dict[str, tuple[str, ...]] = {}
    """Addresses by host, instead of asking DNS: for hosts of one's own, and where runs must not depend on DNS. Checked like all others."""
    ca_file: str = ""
    """Certificates to trust instead of the system's, PEM."""
    requests_max: int = 256
    """Requests of one session in its life, refused ones included; then it gets no more connections."""
    connections_max: int = 4
    """Of one session at a time. A connection carries one request."""
    inflight_max: int = 64
    """Requests in progress for all sessions of this policy together; more wait, within `timeout_s`. Each may hold
    `response_bytes_max` bytes of the service's memory, twice while a body is unpacked."""
    rate_per_s: float = 50.0
    """Requests per second of one tenant, on this node."""
    burst: int = 100
    """Requests that a tenant may make at once before `rate_per_s` holds."""
    untaken_bytes_max: int = 256 << 20
    """Answers that sessions of this policy have not taken yet, together; then more are refused. Bounds the service's memory."""
    header_bytes_max: int = 16 << 10
    """Request line and headers, and those of an answer."""
    request_bytes_max: int = 64 << 10
    """Body of a request."""
    response_bytes_max: int = 2 << 20
    """Body of an answer, packed and unpacked: a larger one is refused, not cut."""
    request_s: float = 10.0
    """For a session to send its whole request once it has a connection, and to take the whole answer."""
    timeout_s: float = 20.0
    """For all that is done about a request: waiting, name resolution, connecting, redirects, the answer."""
    redirects_max: int = 5
    """Followed for searches and pages, each one checked like a first request. Plain requests get redirects as answers."""

    def __post_init__(self) -> None:
        for name in (
            "requests_max", "connections_max", "inflight_max", "rate_per_s", "burst", "header_bytes_max", "request_bytes_max",
            "response_bytes_max", "request_s", "timeout_s", "untaken_bytes_max",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.untaken_bytes_max < self.response_bytes_max:
            raise ValueError(f"untaken_bytes_max {self.untaken_bytes_max} is below response_bytes_max")
        if self.redirects_max < 0:
            raise ValueError(f"redirects_max must not be negative, got {self.redirects_max}")
