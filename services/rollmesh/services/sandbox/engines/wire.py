"""The service's end of a session's socket on the event loop, watched once for the lifetime of the session.

`loop.sock_recv` adds and removes the descriptor around every wait; for short calls these system calls cost more than
the call. (The descriptor is passed as a number, because asyncio formats a socket object for an error that it catches
itself.) Data that arrives while no call waits stays in the socket, which is then not watched until the next call: a
crashed or flooding session must not keep the loop busy.
"""

from __future__ import annotations

import asyncio
import socket

_PIECE_BYTES = 1 << 16


class Wire:
    """One sender and one receiver at a time. Close it on the loop, while no call waits."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._watched = False
        self._waiting: asyncio.Future[bytes] | None = None

    async def send(self, data: bytes) -> None:
        """Send all data. Raises OSError."""
        try:
            num_sent = self._socket.send(data)
        except BlockingIOError:
            num_sent = 0
        if num_sent < len(data):
            await asyncio.get_running_loop().sock_sendall(self._socket, memoryview(data)[num_sent:])

    async def receive(self) -> bytes:
        """Return the available data as soon as there is any; empty at the end of the stream. Raises OSError."""
        loop = asyncio.get_running_loop()
        if not self._watched:
            try:
                return self._socket.recv(_PIECE_BYTES)
            except BlockingIOError:
                loop.add_reader(self._socket.fileno(), self._on_readable)
                self._watched = True
        self._waiting = loop.create_future()
        try:
            return await self._waiting
        finally:
            self._waiting = None

    @property
    def quiet(self) -> bool:
        """Whether neither data nor the end of the stream has arrived since the last receive."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def shutdown(self) -> None:
        """End the stream for a waiting call."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor."""
        self._unwatch()
        self._socket.close()

    def _on_readable(self) -> None:
        waiting = self._waiting
        if waiting is None or waiting.done():
            self._unwatch()
            return
        try:
            waiting.set_result(self._socket.recv(_PIECE_BYTES))
        except BlockingIOError:
            return
        except OSError as error:
            waiting.set_exception(error)

    def _unwatch(self) -> None:
        if self._watched:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._watched = False
