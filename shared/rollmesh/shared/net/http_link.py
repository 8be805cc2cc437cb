"""HTTP to one server: JSON calls with deadlines, a bounded pool of connections, and streams of server-sent events.

Every failure becomes one of the typed errors, so that `shared.retry` and the callers treat them alike:

    not reachable, connection lost, 429, 502, 503    Unavailable
    no response within the deadline                  DeadlineExceeded
    401, 403                                         Unauthenticated
    404, 405                                         Unimplemented, the server lacks the route
    other 4xx                                        InvalidInput with the server's message
    other, or a body that is not as agreed           Internal

Closing a stream early closes its connection, by which the server notices that the client is gone. Keys are sent and
never shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rollmesh.shared.config.extras import libraries_needed
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.errors import (
    ConfigError,
    DeadlineExceeded,
    Internal,
    InvalidInput,
    MeshError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)

if TYPE_CHECKING:
    import aiohttp  # an extra; `check` reads the capabilities of engines without it

T = TypeVar("T")

_BODY_BYTES_MAX = 256 << 20
"""Largest response, and largest message of a stream."""
_MESSAGE_CHARS_MAX = 500
_DONE = b"[DONE]"


class HttpLink:
    """The connections to one server. Used on one event loop."""

    def __init__(
        self, url: str, *, api_key: str = "", api_key_file: str = "", connections_max: int, call_s: float
    ) -> None:
        """`call_s` is the deadline of a call that names none. The key is `api_key`, or read from `api_key_file` when
        the link opens."""
        self.url = url.rstrip("/")
        self._api_key = api_key
        self._api_key_file = api_key_file
        self._connections_max = connections_max
        self._call_s = call_s
        self._session: aiohttp.ClientSession | None = None
        self._failures: tuple[type[Exception], ...] = (OSError,)

    async def open(self) -> None:
        """Raises ConfigError if the file of the key is not readable, or if the library is not installed."""
        with libraries_needed("an HTTP server outside the mesh"):
            import aiohttp
        self._failures = (aiohttp.ClientError, OSError)
        key = await asyncio.to_thread(read_key, self._api_key_file) if self._api_key_file else self._api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=self._connections_max),
            timeout=aiohttp.ClientTimeout(total=None),
            trust_env=False,
            auto_decompress=True,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, type_: type[T], *, params: Mapping[str, str] | None = None) -> T:
        return decoded(await self._call("GET", path, None, params, self._call_s), type_, self._name("GET", path))

    async def get_text(self, path: str) -> str:
        return (await self._call("GET", path, None, None, self._call_s)).decode(errors="replace")

    async def post(
        self,
        path: str,
        body: object,
        type_: type[T],
        *,
        params: Mapping[str, str] | None = None,
        limit_s: float | None = None,
    ) -> T:
        data = await self._call("POST", path, body, params, limit_s or self._call_s)
        return decoded(data, type_, self._name("POST", path))

    async def notify(
        self, path: str, body: object, *, params: Mapping[str, str] | None = None, limit_s: float | None = None
    ) -> None:
        """POST without a look at the response's body."""
        await self._call("POST", path, body, params, limit_s or self._call_s)

    @asynccontextmanager
    async def stream(self, path: str, body: object, *, idle_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """POST, and iterate over the data of the server-sent events up to `[DONE]` or the end of the body.

        Raises `DeadlineExceeded` after `idle_s` seconds without a byte.
        """
        name = self._name("POST", path)
        try:
            async with self._send("POST", path, body, None, idle_s) as response:
                await _check_status(response, name)
                async with aclosing(_events(response, name)) as events:
                    yield events
        except TimeoutError as err:
            raise DeadlineExceeded(f"{name}: no data within {idle_s:g} s") from err
        except self._failures as err:
            raise Unavailable(f"{name}: {_cause(err)}") from err

    async def _call(
        self, method: str, path: str, body: object, params: Mapping[str, str] | None, limit_s: float
    ) -> bytes:
        name = self._name(method, path)
        try:
            async with asyncio.timeout(limit_s), self._send(method, path, body, params, limit_s) as response:
                await _check_status(response, name)
                return await _body(response, name)
        except TimeoutError as err:
            raise DeadlineExceeded(f"{name}: no response within {limit_s:g} s") from err
        except self._failures as err:
            raise Unavailable(f"{name}: {_cause(err)}") from err

    def _send(self, method: str, path: str, body: object, params: Mapping[str, str] | None, idle_s: float) -> Any:
        import aiohttp

        assert self._session is not None, "not open"
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if data is not None else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=idle_s)
        return self._session.request(
            method, self.url + path, data=data, params=params, headers=headers, timeout=timeout, allow_redirects=False
        )

    def _name(self, method: str, path: str) -> str:
        return f"{method} {self.url}{path}"


def read_key(path: str) -> str:
    """Return the key in a file. Raises ConfigError, which does not contain the key."""
    try:
        key = Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"`api_key_file`: cannot read {path}: {_cause(err)}", key="api_key_file") from err
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"`api_key_file`: {path} must contain one printable ASCII key", key="api_key_file")
    return key


def _cause(err: BaseException) -> str:
    return str(err) or type(err).__name__


async def _check_status(response: aiohttp.ClientResponse, name: str) -> None:
    if response.status == 200:
        return
    text = (await response.content.read(1 << 16)).decode(errors="replace")
    what = f"{name}: HTTP {response.status}: {text[:_MESSAGE_CHARS_MAX].strip()}"
    raise _error_class(response.status)(what)


def _error_class(status: int) -> type[MeshError]:
    if status in (429, 502, 503):
        return Unavailable
    if status in (401, 403):
        return Unauthenticated
    if status in (404, 405):
        return Unimplemented
    return InvalidInput if 400 <= status < 500 else Internal


async def _body(response: aiohttp.ClientResponse, name: str) -> bytes:
    parts = bytearray()
    async for part in response.content.iter_any():
        parts += part
        if len(parts) > _BODY_BYTES_MAX:
            raise Internal(f"{name}: the response is longer than {_BODY_BYTES_MAX} bytes")
    return bytes(parts)


async def _events(response: aiohttp.ClientResponse, name: str) -> AsyncGenerator[bytes, None]:
    """Yield the data of each event. An event is `data: ` and one line, and ends with an empty line."""
    rest = b""
    async for part in response.content.iter_any():
        *events, rest = (rest + part).split(b"\n\n")
        if len(rest) > _BODY_BYTES_MAX:
            raise Internal(f"{name}: a message is longer than {_BODY_BYTES_MAX} bytes")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == _DONE:
                return
            if event.startswith(b"data:"):
                yield data


def decoded(data: bytes, type_: type[T], name: str) -> T:
    """Return the JSON value of a response. Raises Internal with `name` if it has another type."""
    try:
        return msgspec.json.decode(data, type=type_)
    except UNDECODABLE as err:
        raise Internal(f"{name}: the response is not as expected: {err}") from err
