"""Clients that send nothing hold no connection of an HTTP server, and the number of connections is limited."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollmesh.shared import asgi_server
from rollmesh.shared.asgi_server import AsgiServer, bind_http

REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[str, int]]:
    listener = bind_http("127.0.0.1:0", "page.address")
    server = await AsgiServer.start(app, listener)
    try:
        yield listener.getsockname()
    finally:
        await server.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", REQUEST, REQUEST + b"GET / HT"])
async def test_a_connection_without_a_whole_request_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(asgi_server, "_REQUEST_S_MAX", 0.3)
    monkeypatch.setattr(asgi_server, "_KEEP_ALIVE_S", 0)
    async with served() as address, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        answer = await reader.read()
        assert answer.endswith(b"ok") == sent.startswith(REQUEST)
        writer.close()


async def test_a_client_that_sends_slowly_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as address, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(3):
            for byte in REQUEST:
                writer.write(bytes([byte]))
                await writer.drain()
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_a_connection_beyond_the_largest_number_is_closed_and_the_others_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asgi_server, "connections_max", lambda: 2)
    async with served() as address, asyncio.timeout(20):
        held = [await asyncio.open_connection(*address) for _ in range(2)]
        for reader, writer in held:
            writer.write(REQUEST)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        reader, writer = await asyncio.open_connection(*address)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        for reader, writer in held:
            writer.write(REQUEST)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            writer.close()
