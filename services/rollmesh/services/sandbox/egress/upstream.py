"""One request to the outside: h11 over asyncio streams, to an address that was checked, everything bounded.

A connection carries one request and is closed. Bodies arrive whole or not at all. What is packed is unpacked here, bounded
while it is unpacked, so that neither the service nor a session meets a decompression bomb.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import zlib
from collections.abc import Iterable, Mapping, Sequence
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
"""Of a session's headers. A list of what passes, not of what is stripped: credentials and hop-by-hop headers have many names."""
_PASSED_BACK = ("content-language", "content-type", "etag", "last-modified", "location", "retry-after")
_ENCODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 47}
"""Content encodings that are unpacked -> zlib's window bits."""
_REDIRECTS = (301, 302, 303, 307, 308)
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Upstream:
    """Asks what the policy allows. Shared by all sessions of a policy."""

    def __init__(self, config: EgressConfig, resolver: addresses.Resolver = addresses.resolve_by_dns) -> None:
        self._config = config
        self._resolver = resolver
        self._tls: ssl.SSLContext | None = None

    @property
    def digest(self) -> str:
        """What is allowed, and from where: answers of another policy are no answers of this one."""
        return hashlib.sha256(msgspec.json.encode((self._config.rules, self._config.response_bytes_max))).hexdigest()

    async def ask(self, request: EgressRequest) -> EgressReply:
        """The answer to one request, redirects as they are. Raises Refused; bounded by the caller's deadline."""
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
            raise EgressRefused("upstream", f"{url.authority} broke off: {error}") from error
        finally:
            writer.transport.abort()

    async def follow(self, target: str, headers: Mapping[str, str]) -> EgressReply:
        """What a GET finds behind redirects; each step is checked like a first request. Raises Refused."""
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
                reason = str(error) or "no answer in time"
        raise EgressRefused("upstream", f"{url.authority} could not be connected to: {reason}")

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
                status, headers = event.status_code, _texts(event.headers)
                if int(headers.get("content-length", 0)) > self._config.response_bytes_max:
                    raise self._too_large()
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._config.response_bytes_max:
                    raise self._too_large()
            elif isinstance(event, h11.EndOfMessage):
                return status, headers, bytes(body)
            elif isinstance(event, h11.ConnectionClosed):
                raise EOFError("no answer")

    def _unpacked(self, encoding: str, packed: bytes) -> bytes:
        encoding = encoding.strip().lower()
        if encoding in ("", "identity") or not packed:
            return packed
        if encoding not in _ENCODINGS:
            raise EgressRefused("encoding", f"the answer is encoded as {encoding[:50]!r}, which nobody asked for")
        unpacker = zlib.decompressobj(_ENCODINGS[encoding])
        try:
            body = unpacker.decompress(packed, self._config.response_bytes_max + 1)
        except zlib.error as error:
            raise EgressRefused("encoding", f"the answer is not {encoding}: {error}") from error
        if len(body) > self._config.response_bytes_max:
            raise self._too_large()
        if not unpacker.eof:
            raise EgressRefused("encoding", f"the answer's {encoding} ends too early")
        return body

    def _too_large(self) -> EgressRefused:
        return EgressRefused("response_bytes", f"the answer exceeds {self._config.response_bytes_max} bytes")


def _upstream_request(request: EgressRequest, url: policy.Url, rule: EgressRule) -> h11.Request:
    headers = {"host": url.authority, "connection": "close", "accept-encoding": "identity", "user-agent": "rollmesh"}
    headers |= {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
    if request.body or request.method in ("POST", "PUT", "PATCH"):
        headers["content-length"] = str(len(request.body))
    headers |= _secrets(rule.header_files)
    return h11.Request(method=request.method, target=url.path, headers=wire(headers))


def _secrets(header_files: Mapping[str, str]) -> dict[str, str]:
    """Read at each request, so that a key can be changed under a running service."""
    try:
        secrets = {name.lower(): Path(path).read_text(encoding="ascii").strip() for name, path in header_files.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise EgressRefused("upstream", "a key of this host cannot be read on the service's side") from error
    if not all(
        value.isprintable() for value in secrets.values()
    ):  # never quoted: the parser's own complaint would show it
        raise EgressRefused("upstream", "a key of this host is no header's value")
    return secrets


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("ascii"): value.decode("latin-1") for name, value in headers}


def _absolute(base: str, location: str) -> str:
    """Where a redirect leads, as text; `policy.parse` judges it. Raises Refused."""
    try:
        return urldefrag(urljoin(base, location)).url
    except ValueError as error:
        raise EgressRefused("malformed", f"the redirect leads to no URL: {error}") from error
