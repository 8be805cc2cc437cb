"""Clients that send nothing hold no connection of an HTTP server, and the number of connections is limited."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest

from rollmesh.shared.net import asgi_server
from rollmesh.shared.net.asgi_server import AsgiServer, bind_http

REQUEST = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: 5\r\n\r\n"
"""A request without its body of 5 bytes."""


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def reading(scope: Any, receive: Any, send: Any) -> None:
    """Reply once the body is there."""
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    if message["type"] == "http.request":
        await app(scope, receive, send)


@contextlib.asynccontextmanager
async def served(app: Any = app) -> AsyncIterator[tuple[str, int]]:
    listener = bind_http("127.0.0.1:0", "page.address")
    server = await AsgiServer.start(app, listener)
    try:
        yield listener.getsockname()
    finally:
        await server.close()


@pytest.mark.parametrize("sent", [b"", b"GET / HT", REQUEST, REQUEST + b"GET / HT", POST, POST + b"1", REQUEST + POST])
async def test_a_connection_without_a_whole_request_is_closed(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(asgi_server, "_HEADERS_S_MAX", 0.3)
    monkeypatch.setattr(asgi_server, "_BODY_S_MAX", 0.3)
    monkeypatch.setattr(asgi_server, "_KEEP_ALIVE_S", 0)
    async with served(reading) as address, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        answer = await reader.read()
        assert answer.endswith(b"ok") == sent.startswith(REQUEST)
        writer.close()


async def test_a_reply_that_does_not_wait_for_the_body_ends_the_connection_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asgi_server, "_LINGER_S", 0.3)
    async with served() as address, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(POST)
        assert (await reader.read()).endswith(b"ok")
        writer.close()


async def test_a_connection_is_used_again_once_the_body_that_nothing_read_is_there() -> None:
    async with served() as address, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            writer.write(POST)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            writer.write(b"12345")
        writer.close()


async def test_a_client_that_reads_no_reply_holds_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi_server, "_KEEP_ALIVE_S", 0.2)
    ended = asyncio.Event()

    async def large(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(64 << 20)})
        ended.set()

    listener = bind_http("127.0.0.1:0", "page.address")
    server = await AsgiServer.start(large, listener)
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(REQUEST)
        await ended.wait()
        while server._server.server_state.connections:  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionResetError):
            assert len(await reader.read()) < 64 << 20
        writer.close()
    await server.close()


LF = REQUEST.replace(b"\r\n", b"\n")


@pytest.mark.parametrize(
    "sent",
    [
        POST.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n\r\n"),
        POST.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n12345"),
        POST.replace(b"\r\n\r\n", b"\r\ncontent-length: 6\r\n\r\n12345"),
        POST.replace(b": 5", b": 5, 5") + b"12345",
        POST.replace(b"Content-Length: 5", b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked") + b"0\r\n\r\n",
        LF,
        b"\n" + REQUEST,
        REQUEST.replace(b"Host: here\r\n", b"Host: here\n"),
        REQUEST.replace(b"\r\n\r\n", b"\r\n\n"),
    ],
)
@pytest.mark.parametrize("first", [b"", REQUEST])
async def test_a_request_whose_end_is_ambiguous_is_rejected_and_ends_the_connection(first: bytes, sent: bytes) -> None:
    async with served() as address, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        if first:
            writer.write(first)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(sent + REQUEST)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"connection: close" in answer.lower()
        assert answer.count(b"HTTP/1.1") == 1
        writer.close()


async def test_a_chunked_body_is_read_and_the_connection_used_again() -> None:
    chunked = POST.replace(b"Content-Length: 5", b"Transfer-Encoding: chunked")
    async with served(reading) as address, asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(2):
            writer.write(chunked + b"3\r\na\nb\r\n0\r\n\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
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


async def test_a_burst_of_connections_is_accepted_in_parts_so_that_other_work_goes_on() -> None:
    listener = bind_http("127.0.0.1:0", "page.address")
    server = await AsgiServer.start(app, listener)
    opened = server._server.server_state.connections
    clients = [socket.create_connection(listener.getsockname(), timeout=5) for _ in range(100)]  # the loop does not run
    try:
        found = [0]
        async with asyncio.timeout(20):
            while len(opened) < len(clients):
                await asyncio.sleep(0)
                found.append(len(opened))
        assert max(after - before for before, after in pairwise(found)) <= asgi_server._ACCEPTED_MAX
    finally:
        for client in clients:
            client.close()
        await server.close()
