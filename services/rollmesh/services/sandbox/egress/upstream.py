"""One external request: h11 over asyncio streams, to a checked address, with all sizes bounded.

A connection carries one request and is closed. Bodies are returned completely or not at all. Compressed bodies are
decompressed here under a size limit, so that neither the service nor a session meets a decompression bomb.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urldefrag, urljoin

import h11
import msgspec

from rollmesh.services.sandbox.egress import addresses, policy
from rollmesh.services.sandbox.egress.config import EgressConfig, EgressRule
from rollmesh.services.sandbox.egress.exchange import EgressRefused, EgressReply, EgressRequest, wire

_PIECE_BYTES = 1 << 16
_CONNECT_S = 5.0
_PASSED_ON = ("accept", "accept-language", "content-type", "if-modified-since", "if-none-match")
"""Headers of a session that are forwarded. An allow-list, because credentials and hop-by-hop headers have many
names."""
_PASSED_BACK = ("content-language", "content-type", "etag", "last-modified", "location", "retry-after")
_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 47}
"""Content encodings that are decompressed -> zlib's window bits."""
_REDIRECTS = (301, 302, 303, 307, 308)
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Upstream:
    """Makes the requests that the policy allows. Shared by all sessions of a policy."""

    def __init__(self, config: EgressConfig, resolver: addresses.Resolver = addresses.resolve_by_dns) -> None:
        self._config = config
        self._resolver = resolver
        self._tls: ssl.SSLContext | None = None

    @property
    def digest(self) -> str:
        """Digest of the rules and sizes, because responses under another policy must not be replayed."""
        return hashlib.sha256(msgspec.json.encode((self._config.rules, self._config.response_bytes_max))).hexdigest()

    async def ask(self, request: EgressRequest) -> EgressReply:
        """Return the response to one request; redirects are returned unchanged. Raises EgressRefused. Bounded by the
        caller's deadline."""
        url = policy.parse(request.target)
        rule = policy.allow(self._config.rules, request.method, url)
        found = await addresses.resolve(
            url.host,
            url.port,
            fixed=self._config.addresses,
            resolver=self._resolver,
            allow_private=rule.allow_private,
        )
        reader, writer = await self._connect(url, found)
        try:
            return await self._exchange(reader, writer, _upstream_request(request, url, rule), request.body)
        except (OSError, h11.ProtocolError, EOFError) as error:
            raise EgressRefused("upstream", f"the connection to {url.authority} failed: {error}") from error
        finally:
            writer.transport.abort()

    async def follow(self, target: str, headers: Mapping[str, str]) -> EgressReply:
        """Follow redirects of a GET; each step is checked like a first request. Raises EgressRefused."""
        for _ in range(self._config.redirects_max + 1):
            reply = await self.ask(EgressRequest(method="GET", target=target, headers=headers))
            location = reply.headers.get("location")
            if reply.status not in _REDIRECTS or location is None:
                return reply
            target = _absolute(target, location)
        raise EgressRefused("redirects", f"more than {self._config.redirects_max} redirects")

    async def _connect(self, url: policy.Url, found: Sequence[str]) -> _Streams:
        reason = ""
        for address in found:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(
                        address,
                        url.port,
                        ssl=self._trusted() if url.scheme == "https" else None,
                        server_hostname=url.host if url.scheme == "https" else None,
                    )
            except (OSError, TimeoutError) as error:
                reason = str(error) or "timeout"
        raise EgressRefused("upstream", f"cannot connect to {url.authority}: {reason}")

    def _trusted(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context(cafile=self._config.ca_file or None)
        return self._tls

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: h11.Request, body: bytes
    ) -> EgressReply:
        link = h11.Connection(h11.CLIENT, max_incomplete_event_size=self._config.header_bytes_max)
        parts = [link.send(head), link.send(h11.Data(data=body)) if body else b"", link.send(h11.EndOfMessage())]
        writer.write(b"".join(part or b"" for part in parts))
        await writer.drain()
        status, headers, packed = await self._receive(link, reader)
        kept = {name: value for name, value in headers.items() if name in _PASSED_BACK}
        return EgressReply(
            status=status, headers=kept, body=self._unpacked(headers.get("content-encoding", ""), packed)
        )

    async def _receive(self, link: h11.Connection, reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
        status, headers, body = 0, {}, bytearray()
        while True:
            event = link.next_event()
            if event is h11.NEED_DATA:
                link.receive_data(await reader.read(_PIECE_BYTES))
            elif isinstance(event, h11.Response):
                status = event.status_code
                headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
                if int(headers.get("content-length", 0)) > self._config.response_bytes_max:
                    raise self._too_large()
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._config.response_bytes_max:
                    raise self._too_large()
            elif isinstance(event, h11.EndOfMessage):
                return status, headers, bytes(body)
            elif isinstance(event, h11.ConnectionClosed):
                raise EOFError("no response")

    def _unpacked(self, encoding: str, packed: bytes) -> bytes:
        encoding = encoding.strip().lower()
        if encoding in ("", "identity") or not packed:
            return packed
        if encoding not in _ENCODINGS:
            raise EgressRefused("encoding", f"the response has the encoding {encoding[:50]!r}, which was not requested")
        unpacker = zlib.decompressobj(_ENCODINGS[encoding])
        try:
            body = unpacker.decompress(packed, self._config.response_bytes_max + 1)
        except zlib.error as error:
            raise EgressRefused("encoding", f"the response is not valid {encoding}: {error}") from error
        if len(body) > self._config.response_bytes_max:
            raise self._too_large()
        if not unpacker.eof:
            raise EgressRefused("encoding", f"the {encoding} data of the response is truncated")
        return body

    def _too_large(self) -> EgressRefused:
        return EgressRefused("response_bytes", f"the response exceeds {self._config.response_bytes_max} bytes")


def _upstream_request(request: EgressRequest, url: policy.Url, rule: EgressRule) -> h11.Request:
    headers = {"host": url.authority, "connection": "close", "accept-encoding": "identity", "user-agent": "rollmesh"}
    headers |= {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    if request.body or request.method in ("POST", "PUT", "PATCH"):
        headers["content-length"] = str(len(request.body))
    headers |= _secrets(rule.header_files)
    return h11.Request(method=request.method, target=url.path, headers=wire(headers))


def _secrets(header_files: Mapping[str, str]) -> dict[str, str]:
    """Read secret headers at each request, so that a key can be changed while the service runs."""
    try:
        secrets = {name.lower(): Path(path).read_text(encoding="ascii").strip() for name, path in header_files.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise EgressRefused("upstream", "the service cannot read a key for this host") from error
    # The error of the parser would show the value.
    if not all(value.isprintable() for value in secrets.values()):
        raise EgressRefused("upstream", "a key for this host is not a valid header value")
    return secrets


def _absolute(base: str, location: str) -> str:
    """Return the target of a redirect as text, which `policy.parse` checks. Raises EgressRefused."""
    try:
        return urldefrag(urljoin(base, location)).url
    except ValueError as error:
        raise EgressRefused("malformed", f"the redirect target is not a URL: {error}") from error
