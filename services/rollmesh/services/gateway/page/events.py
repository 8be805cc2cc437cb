"""A stream of server-sent events: the newest values of some sections, for one browser.

Each event has the name of its section and a line of JSON. A browser that reads slowly delays only its own stream: while
an event is being sent, newer values replace each other. If an event is not received within a limit, the connection
ends, and the browser reconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from starlette.types import Message, Receive, Scope, Send

from rollmesh.services.gateway.page.feed import Sections

HEARTBEAT_S = 15.0
"""Without an event for this time, a comment is sent, so that a broken connection is detected."""
RECONNECT_MS = 1000
END_S_MAX = 1.0
"""Time limit of the end of a stream, in seconds. Without it the server closes the connection and logs an error."""


class PageEvents:
    """An ASGI response. It lasts until the browser disconnects, its limit passes, or `closing` is set."""

    def __init__(
        self,
        sections: Sequence[Sections],
        *,
        send_s_max: float,
        interval_s: float,
        closing: asyncio.Event,
        limit_s: float | None = None,
    ) -> None:
        """`interval_s` is the shortest time between two sets of events. The stream lasts for at most `limit_s`, if it
        is given."""
        self._sections = sections
        self._send_s_max = send_s_max
        self._interval_s = interval_s
        self._closing = closing
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        ends = [asyncio.create_task(_disconnected(receive)), asyncio.create_task(self._closing.wait())]
        sending = asyncio.create_task(self._send_all(send))
        try:
            done, _ = await asyncio.wait([*ends, sending], timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*ends, sending):
                task.cancel()
            await asyncio.gather(*ends, sending, return_exceptions=True)
        if not done & {ends[0], sending}:  # the client is there and reads
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S_MAX):
                    await send({"type": "http.response.body", "body": b""})

    async def _send_all(self, send: Send) -> None:
        """Send until the client is too slow; the connection then ends with the response."""
        sent = [0] * len(self._sections)
        await self._send(send, f"retry: {RECONNECT_MS}\n\n".encode())
        while True:
            events = bytearray()
            for number, sections in enumerate(self._sections):
                for name, value in sections.after(sent[number]):
                    events += b"event: %s\ndata: %s\n\n" % (name.encode(), value)
                sent[number] = sections.revision
            if events:
                await self._send(send, bytes(events))
                await asyncio.sleep(self._interval_s)
            await self._wait(send, sent)

    async def _wait(self, send: Send, sent: Sequence[int]) -> None:
        waits = [asyncio.create_task(one.wait(at)) for one, at in zip(self._sections, sent, strict=True)]
        try:
            done, _ = await asyncio.wait(waits, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if not done:
            await self._send(send, b": still here\n\n")

    async def _send(self, send: Send, body: bytes) -> None:
        async with asyncio.timeout(self._send_s_max):
            await send({"type": "http.response.body", "body": body, "more_body": True})


async def _disconnected(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
