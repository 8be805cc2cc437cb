"""Streams of events: the newest values, bounded for slow readers, closed with the page."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np

from rollmesh.services.gateway.page.events import PageEvents
from rollmesh.services.gateway.page.feed import Sections
from rollmesh.services.gateway.page.plain import plain
from rollmesh.services.gateway.page.server import listen_http
from rollmesh.services.gateway.page.transcripts import token_texts
from rollmesh.shared.domain.trajectory import IntArray
from rollmesh.shared.net.asgi_server import AsgiServer
from rollmesh.v1 import run_pb2


class Browser:
    """An ASGI connection whose reader may stop."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.got = bytearray()
        self.arrived = asyncio.Event()
        self.gone = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.got += message.get("body", b"")
        self.arrived.set()

    async def until(self, text: bytes) -> None:
        async with asyncio.timeout(10):
            while text not in self.got:
                self.arrived.clear()
                await self.arrived.wait()


def stream(
    sections: Sections, closing: asyncio.Event, *, send_s_max: float = 10.0, limit_s: float | None = None
) -> PageEvents:
    return PageEvents([sections], send_s_max=send_s_max, interval_s=0.001, closing=closing, limit_s=limit_s)


async def test_a_slow_reader_gets_the_newest_value_only() -> None:
    sections, browser, closing = Sections(), Browser(), asyncio.Event()
    task = asyncio.create_task(stream(sections, closing)({}, browser.receive, browser.send))
    sections.set("run", b"0")
    await browser.until(b"event: run\ndata: 0\n\n")
    browser.reads.clear()
    for number in range(1, 1000):
        sections.set("run", b"%d" % number)
        await asyncio.sleep(0)
    browser.reads.set()
    await browser.until(b"data: 999\n\n")
    assert browser.got.count(b"event: run") <= 3, "values in between are replaced, not queued"
    closing.set()
    async with asyncio.timeout(10):
        await task


async def test_a_reader_that_stops_is_disconnected() -> None:
    sections, browser = Sections(), Browser()
    browser.reads.clear()
    sections.set("run", b"0")
    started = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] != "http.response.start":
            started.set()
            await browser.send(message)

    async with asyncio.timeout(10):
        await stream(sections, asyncio.Event(), send_s_max=0.05)({}, browser.receive, send)
    assert started.is_set()


async def test_a_stream_ends_when_the_browser_leaves() -> None:
    sections, browser = Sections(), Browser()
    task = asyncio.create_task(stream(sections, asyncio.Event())({}, browser.receive, browser.send))
    await browser.until(b"retry")
    browser.gone.set()
    async with asyncio.timeout(10):
        await task


async def test_a_stream_ends_with_the_session_that_opened_it() -> None:
    ended: list[Any] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            ended.append(message)

    async with asyncio.timeout(10):
        await stream(Sections(), asyncio.Event(), limit_s=0.05)({}, Browser().receive, send)
    assert ended, "the response is complete, so that the browser reconnects and is asked to log in"


async def test_a_client_that_never_reads_loses_its_connection() -> None:
    """The server closes the connection, but bytes that were sent before keep it open until the kernel drops them."""
    sections = Sections()
    sections.set("run", b"x" * (8 << 20))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await stream(sections, asyncio.Event(), send_s_max=0.2)(scope, receive, send)

    listener = listen_http("127.0.0.1:0", unread_s_max=0.5)
    server = await AsgiServer.start(app, listener)
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(listener.getsockname())
            client.sendall(b"GET / HTTP/1.1\r\nHost: page\r\n\r\n")
            async with asyncio.timeout(30):
                while not (connections := server._server.server_state.connections):  # noqa: ASYNC110 (of the library)
                    await asyncio.sleep(0.01)
                while connections:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    finally:
        await server.close()


def test_an_equal_value_is_not_sent_again() -> None:
    sections = Sections()
    sections.set("run", b"1")
    before = sections.revision
    sections.set("run", b"1")
    assert sections.revision == before
    assert list(sections.after(before)) == []


def test_messages_become_plain_numbers_and_names() -> None:
    state = run_pb2.RunState(
        run="r", policies=[run_pb2.PolicyState(policy="main", applied_step=3, trained_by_staleness={0: 7})]
    )
    found = plain(state)
    assert found["policies"][0]["applied_step"] == 3
    assert found["policies"][0]["trained_by_staleness"] == {"0": 7}
    assert found["seconds"] == 0.0, "zeros are included"


class Utf8:
    """A token per byte."""

    def decode(self, token_ids: IntArray) -> str:
        return bytes(token_ids.tolist()).decode(errors="replace")


def test_a_character_of_several_tokens_is_the_text_of_the_first() -> None:
    text = "a€b\n"
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    assert token_texts(ids, Utf8()) == ["a", "€", "", "", "b", "\n"]
    assert "".join(token_texts(ids, Utf8())) == text


def test_bytes_that_are_no_character_are_shown_one_by_one() -> None:
    ids = np.array([0xFF, 0x41, 0xE2], np.int32)
    assert token_texts(ids, Utf8()) == ["\ufffd", "A", "\ufffd"]


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    assert token_texts(np.array([3, 5], np.int32), None) == ["3 ", "5 "]
