"""The allow-list: decide from the text of a URL whether a session may request it. Addresses are checked separately,
when the name is resolved.

URLs are parsed strictly and never repaired. Any URL that two parsers could read differently (user names, backslashes,
fragments, other alphabets, numbers as hosts) is refused, because the checked host must be the requested host.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from rollmesh.services.sandbox.egress.config import PORTS, EgressRule
from rollmesh.services.sandbox.egress.exchange import EgressRefused

_URL = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/?]*)(?P<path>/[^?]*)?(?P<query>\?.*)?", re.IGNORECASE
)
_AUTHORITY = re.compile(r"(?P<host>[a-z0-9_-]+(\.[a-z0-9_-]+)*)\.?(:(?P<port>[0-9]{1,5}))?", re.IGNORECASE)
_SAFE = re.compile(r"[!-~]*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_HIDDEN_SLASH = re.compile(r"%(25)*(2f|5c)", re.IGNORECASE)
_HIDDEN_DOT = re.compile(r"%(25)+2e", re.IGNORECASE)
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Url:
    """A parsed URL."""

    scheme: str
    host: str
    port: int
    path: str
    """Path and query, as sent."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"

    @property
    def authority(self) -> str:
        """Host, and the port if it is not the default of the scheme."""
        return self.host if self.port == PORTS[self.scheme] else f"{self.host}:{self.port}"


def parse(text: str) -> Url:
    """Parse an absolute URL. Raises EgressRefused."""
    shown = text[:_SHOWN_CHARS]
    parts = _URL.fullmatch(text)
    if parts is None or not _SAFE.fullmatch(text) or "\\" in text or "#" in text:
        raise EgressRefused("malformed", f"not a plain absolute URL: {shown!r}")
    scheme = parts["scheme"].lower()
    if scheme not in PORTS:
        raise EgressRefused("scheme", f"scheme {scheme!r} is not supported; known: {', '.join(PORTS)}")
    if parts["authority"].startswith("["):
        raise EgressRefused("ip_literal", f"hosts are given by name, not by address: {shown!r}")
    authority = _AUTHORITY.fullmatch(parts["authority"])
    if authority is None:
        raise EgressRefused(
            "malformed", f"not a plain host, with a port at most: {parts['authority'][:_SHOWN_CHARS]!r}"
        )
    host = authority["host"].lower()
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        raise EgressRefused("ip_literal", f"hosts are given by name, not by address: {host!r}")
    port = int(authority["port"] or PORTS[scheme])
    return Url(scheme, host, port, (parts["path"] or "/") + (parts["query"] or ""))


def allow(rules: Sequence[EgressRule], method: str, url: Url) -> EgressRule:
    """Return the first rule that allows a request. Raises EgressRefused with the mismatch of the closest rule."""
    nearest = EgressRefused("host", f"{url.host} is not on the allow-list")
    depth = 0
    for rule in rules:
        if not _host_fits(rule.host, url.host):
            continue
        misfit = _misfit(rule, method, url)
        if misfit is None:
            return rule
        if misfit[0] > depth:
            depth, nearest = misfit
    raise nearest


def _host_fits(pattern: str, host: str) -> bool:
    return host.endswith(pattern) and host != pattern if pattern.startswith(".") else host == pattern


def _misfit(rule: EgressRule, method: str, url: Url) -> tuple[int, EgressRefused] | None:
    """Return why a rule for this host does not allow the request, and how close it came."""
    if url.scheme not in rule.schemes:
        return 1, EgressRefused("scheme", f"{url.host} is allowed by {', '.join(rule.schemes)} only")
    if url.port not in (rule.ports or (PORTS[url.scheme],)):
        return 2, EgressRefused("port", f"port {url.port} of {url.host} is not allowed")
    if method not in rule.methods:
        return 3, EgressRefused("method", f"{method} is not allowed at {url.host}; allowed: {', '.join(rule.methods)}")
    if not _path_fits(rule.path_prefix, url.path.partition("?")[0]):
        return 4, EgressRefused("path", f"only {rule.path_prefix} and below is allowed at {url.host}")
    return None


def _path_fits(prefix: str, path: str) -> bool:
    """Match by whole segments. A path that a server might decode to another path never matches a narrower prefix."""
    if any(segment in (".", "..") for segment in unquote(path).split("/")) or _HIDDEN_DOT.search(path):
        return False
    if prefix == "/":
        return True
    if _HIDDEN_SLASH.search(path):
        return False
    return path == prefix or path.startswith(prefix.rstrip("/") + "/")
