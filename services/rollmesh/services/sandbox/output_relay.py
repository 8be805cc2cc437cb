"""What a command prints, on its way to the client of its stream.

The queue of a stream holds at most one relay per command; what comes while it waits there joins what it has. So a client that reads
slowly makes nobody wait and nothing grow: a command has at most its kept output here, since the engine passes on no more than that.
"""

from __future__ import annotations

import asyncio

from rollmesh.v1 import sandbox_pb2

_CHARACTER_BYTES_MAX = 4
"""In UTF-8."""


class OutputRelay:
    """For one command. `pass_on` is what the engine calls; a message of a stream has at most `bytes_max` bytes of text."""

    def __init__(self, request: sandbox_pb2.WorkRequest, answers: asyncio.Queue[Answer], bytes_max: int) -> None:
        self._chars_max = max(1, bytes_max // _CHARACTER_BYTES_MAX)
        self._request_id = request.request_id
        self._session_id = request.session_id
        self._answers = answers
        self._pieces: list[tuple[int, list[str]]] = []

    def pass_on(self, descriptor: int, text: str) -> None:
        """Queue a piece, behind what was queued before."""
        if not self._pieces:
            self._answers.put_nowait(self)
        if not self._pieces or self._pieces[-1][0] != descriptor:
            self._pieces.append((descriptor, []))
        self._pieces[-1][1].append(text)

    def take(self) -> list[sandbox_pb2.WorkResponse]:
        """All that waits, in order."""
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


Answer = sandbox_pb2.WorkResponse | OutputRelay | None
"""In a stream's queue: an answer that is a request's last, output ahead of one, or the end."""
