"""Relay the output of a command to the client of its stream.

The queue of a stream holds at most one relay per command. Output that arrives while the relay is queued is appended to
it. A slow client therefore neither blocks commands nor grows the queue: the engine emits at most the retained output of
a command.
"""

from __future__ import annotations

import asyncio

from rollmesh.services.sandbox.result_relay import ResultRelay
from rollmesh.v1 import sandbox_pb2

_CHARACTER_BYTES_MAX = 4
"""Maximum size of a character in UTF-8."""


class OutputRelay:
    """Relay of one command. The engine calls `pass_on`. A message has at most `bytes_max` bytes of text."""

    def __init__(self, request: sandbox_pb2.WorkRequest, answers: asyncio.Queue[Answer], bytes_max: int) -> None:
        self._chars_max = max(1, bytes_max // _CHARACTER_BYTES_MAX)
        self._request_id = request.request_id
        self._session_id = request.session_id
        self._answers = answers
        self._pieces: list[tuple[int, list[str]]] = []

    def pass_on(self, descriptor: int, text: str) -> None:
        """Append a piece to the queued output."""
        if not self._pieces:
            self._answers.put_nowait(self)
        if not self._pieces or self._pieces[-1][0] != descriptor:
            self._pieces.append((descriptor, []))
        self._pieces[-1][1].append(text)

    def take(self) -> list[sandbox_pb2.WorkResponse]:
        """Return all queued output in order."""
        pieces, self._pieces = self._pieces, []
        return [
            sandbox_pb2.WorkResponse(
                request_id=self._request_id,
                session_id=self._session_id,
                output=sandbox_pb2.OutputPiece(descriptor=descriptor, text=text[at : at + self._chars_max]),
            )
            for descriptor, texts in pieces
            for text in ["".join(texts)]
            for at in range(0, len(text), self._chars_max)
        ]


Answer = sandbox_pb2.WorkResponse | OutputRelay | ResultRelay | None
"""Element of a stream's queue: a final response, output before one, results of stateless calls, or None at the end."""
