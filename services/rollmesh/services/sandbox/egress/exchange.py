"""What passes through the proxy: a session's request, the reply, and the refusal that names its rule."""

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
"""HTTP status by refusing rule. From 500 on it is not the session's doing."""


class EgressRefused(Exception):
    """The proxy does not do it. `rule` is a key of `STATUS`; the text goes to the session."""

    def __init__(self, rule: str, why: str) -> None:
        super().__init__(why)
        self.rule = rule
        self.status = STATUS[rule]


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressRequest:
    """As the session sent it, whole."""

    method: str
    target: str
    """Absolute (`https://host/path`) for the outside, or a path for the proxy's own services."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Lower-case names."""
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class EgressReply:
    """As the session gets it, whole."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    """Lower-case names; without Content-Length, which follows from the body."""
    body: bytes = b""
    cached: bool = False
    refused_by: str = ""


def wire(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as h11 takes them. A value's bytes are anything from 128 on, too, as they came; h11 encodes text as ASCII only."""
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


def refusal(error: EgressRefused, policy: str) -> EgressReply:
    """The reply that tells a session why not."""
    text = f"egress refused by rule `{error.rule}` of policy `{policy}`: {error}\n"
    headers = {"content-type": "text/plain; charset=utf-8", "x-refused-by": error.rule}
    return EgressReply(status=error.status, headers=headers, body=text.encode(), refused_by=error.rule)
