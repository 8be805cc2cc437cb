"""Data types of the proxy: a session's request, its reply, and the refusal that names a rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

STATUS = {
    "malformed": 400,
    "ip_literal": 403,
    "host": 403,
    "scheme": 403,
    "port": 403,
    "method": 403,
    "path": 403,
    "address": 403,
    "not_found": 404,
    "not_recorded": 404,
    "connect": 405,
    "slow": 408,
    "request_bytes": 413,
    "content": 415,
    "requests": 429,
    "rate": 429,
    "header_bytes": 431,
    "response_bytes": 502,
    "encoding": 502,
    "redirects": 502,
    "upstream": 502,
    "busy": 503,
    "timeout": 504,
}
"""HTTP status by refusing rule. The session does not cause those from 500 on."""


class EgressRefused(Exception):
    """The proxy refuses a request. `rule` is a key of `STATUS`; the session gets the text."""

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(why)
        self.rule = rule
        self.status = STATUS[rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressRequest:
    """A complete request of a session."""

    method: str
    target: str
    """An absolute URL (`https://host/path`) for an external request, or a path for the proxy's own services."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Lower-case names."""
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressReply:
    """A complete reply to a session."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """Lower-case names; without Content-Length, which follows from the body."""
    body: bytes = b""
    cached: bool = False
    refused_by: str = ""


def wire(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Encode headers for h11. Values keep their original bytes, also above 127; h11 itself encodes text as ASCII
    only."""
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def refusal(error: EgressRefused, policy: str) -> EgressReply:
    """Return the reply that explains a refusal to a session."""
    text = f"egress refused by rule `{error.rule}` of policy `{policy}`: {error}\n"
    headers = {"content-type": "text/plain; charset=utf-8", "x-refused-by": error.rule}
    return EgressReply(status=error.status, headers=headers, body=text.encode(), refused_by=error.rule)
