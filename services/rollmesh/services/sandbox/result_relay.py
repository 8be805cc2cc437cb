"""Relay results of stateless calls to the client of their stream, many in one message.

The queue of a stream holds at most one such relay. Results that arrive while the relay is queued are sent together with
those before them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from rollmesh.v1 import sandbox_pb2


class ResultRelay:
    """Relay of one stream. A message has at most `bytes_max` bytes of results, or one result."""

    def __init__(self, answers: asyncio.Queue[Any], bytes_max: int) -> None:
        self._answers = answers
        self._bytes_max = bytes_max
        self._results: list[sandbox_pb2.StatelessResult] = []
        self._queued = False
        self._num_ended = 0

    def add(self, result: sandbox_pb2.StatelessResult | None, *, last: bool) -> None:
        """Add a result; None for a request without calls. `last`: whether it is the last one of its request."""
        if result is not None:
            self._results.append(result)
        self._num_ended += last
        if not self._queued:
            self._queued = True
            self._answers.put_nowait(self)

    def take(self) -> tuple[list[sandbox_pb2.WorkResponse], int]:
        """Return the messages with all queued results, and the number of requests whose last result is among them."""
        results, self._results = self._results, []
        num_ended, self._num_ended = self._num_ended, 0
        self._queued = False
        return list(self._messages(results)), num_ended

    def _messages(self, results: list[sandbox_pb2.StatelessResult]) -> Iterator[sandbox_pb2.WorkResponse]:
        message, room = sandbox_pb2.WorkResponse(), self._bytes_max
        for result in results:
            room -= result.ByteSize()
            if room < 0 and message.stateless.results:
                yield message
                message, room = sandbox_pb2.WorkResponse(), self._bytes_max - result.ByteSize()
            message.stateless.results.append(result)
        if message.stateless.results:
            yield message
