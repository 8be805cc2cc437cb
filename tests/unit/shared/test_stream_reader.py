"""A reader whose consumers are lost at once does not create new ones without a pause, and reports silent ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from nats.aio.msg import Msg

from rollmesh.shared.bus import stream_reader
from rollmesh.shared.bus.bus import UnknownStream
from rollmesh.shared.bus.stream_reader import StreamReader

CONSUMERS = 4


class LosingClient:
    """A connection on which each request of a batch is answered with `no responders`."""

    is_connected = True

    def __init__(self) -> None:
        self._arrive: Callable[[Msg], Awaitable[None]] | None = None

    def new_inbox(self) -> str:
        return "_INBOX.1"

    async def subscribe(self, inbox: str, cb: Callable[[Msg], Awaitable[None]]) -> Any:
        self._arrive = cb

        async def unsubscribe() -> None:
            self._arrive = None

        return SimpleNamespace(unsubscribe=unsubscribe)

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        if reply and self._arrive is not None:
            client: Any = None
            await self._arrive(Msg(_client=client, subject=reply, headers={"Status": "503"}))


class LosingLink:
    """Creates consumers until the stream is gone, and notes when."""

    closed = False

    def __init__(self) -> None:
        self.client = LosingClient()
        self.on_lost: set[Callable[[], None]] = set()
        self.created_s: list[float] = []

    async def call(self, verb: object, deadline_s: float, what: str) -> Any:
        if len(self.created_s) == CONSUMERS:
            raise UnknownStream("there is no stream s")
        self.created_s.append(asyncio.get_running_loop().time())
        return SimpleNamespace(name=f"c{len(self.created_s)}")


async def test_consumers_that_are_lost_at_once_are_created_with_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_reader, "_PAUSE_S", 0.05)
    link: Any = LosingLink()
    with pytest.raises(UnknownStream):
        async with asyncio.timeout(10):
            await anext(StreamReader("s", link, batch=8, deadline_s=1.0).follow(1))
    assert len(link.created_s) == CONSUMERS
    assert link.created_s[-1] - link.created_s[0] >= 0.05 * (CONSUMERS - 1)


async def test_a_silent_consumer_is_reported_while_it_is_quiet_and_replaced_when_it_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_reader, "_LOST_S", 0.04)
    monkeypatch.setattr(stream_reader, "_PAUSE_S", 0.0)
    link: Any = LosingLink()
    monkeypatch.setattr(LosingClient, "publish", _no_answer)
    reader = StreamReader("s", link, batch=8, deadline_s=1.0)
    async with asyncio.timeout(10), aclosing(reader.watch(1, 0.01)) as records:
        found = [(await anext(records), len(link.created_s)) for _ in range(5)]
    assert found == [(None, 1)] * 4 + [(None, 2)], "three quiet times and the loss, then the next consumer"


async def _no_answer(client: LosingClient, subject: str, payload: bytes, reply: str = "") -> None: ...
