"""`MessagePipe`: one direction of a direct call, a queue of encoded messages that is bounded by their size."""

from __future__ import annotations

import asyncio
from collections import deque

WINDOW_BYTES = 64 * 1024
"""Bytes of messages beyond which a writer waits for the reader, as the flow-control window of an HTTP/2 stream."""
MESSAGE_OVERHEAD_BYTES = 64
"""What a message counts in addition to its size, in bytes. It bounds the number of empty messages."""

_Waiters = deque[asyncio.Future[None]]


class MessagePipe:
    """Messages on their way. A message that is larger than the window passes alone. Use it on one event loop."""

    __slots__ = ("_ended", "_messages", "_num_bytes", "_readers", "_writers")

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._num_bytes = 0
        self._ended = False
        self._readers: _Waiters = deque()
        self._writers: _Waiters = deque()

    async def put(self, message: bytes) -> bool:
        """Append a message as soon as the window is open. Return False if the pipe has ended."""
        while self._num_bytes >= WINDOW_BYTES and not self._ended:
            await _wait_in(self._writers)
        return self.put_nowait(message)

    def put_nowait(self, message: bytes) -> bool:
        """Append a message, also beyond the window. Return False if the pipe has ended."""
        if self._ended:
            return False
        self._messages.append(message)
        self._num_bytes += len(message) + MESSAGE_OVERHEAD_BYTES
        if self._readers:
            _wake(self._readers)
        return True

    async def get(self) -> bytes | None:
        """Return the next message. None after the last one."""
        while not self._messages and not self._ended:
            await _wait_in(self._readers)
        return self.get_nowait()

    def get_nowait(self) -> bytes | None:
        """Return the next message, None if there is none."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._num_bytes -= len(message) + MESSAGE_OVERHEAD_BYTES
        if self._writers:
            _wake(self._writers)
        return message

    def end(self) -> None:
        """Accept no further message. The reader still gets those that are here. Idempotent."""
        self._ended = True
        _wake(self._readers)
        _wake(self._writers)

    def abandon(self) -> None:
        """End the pipe and drop its messages. Idempotent."""
        self._messages.clear()
        self._num_bytes = 0
        self.end()


async def _wait_in(waiters: _Waiters) -> None:
    waiter = asyncio.get_running_loop().create_future()
    waiters.append(waiter)
    try:
        await waiter
    except asyncio.CancelledError:
        if waiter in waiters:
            waiters.remove(waiter)
        raise


def _wake(waiters: _Waiters) -> None:
    while waiters:
        waiter = waiters.popleft()
        if not waiter.done():
            waiter.set_result(None)
