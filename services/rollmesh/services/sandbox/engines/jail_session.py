"""The service's side of one session: requests and replies on its socket, under a deadline. The replies are hostile.

A reply is bounded in length before it is read, in its number of strings before it is decoded into a strict schema, and
in every field before it is returned. After a missed deadline, an invalid reply or a cancelled request the session must
be ended, because its next reply is unpredictable.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from rollmesh.sandbox_runtime import framing, records
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.snapshot import LOST_MAX, NAME_CHARS_MAX, NUM_SECTIONS
from rollmesh.services.sandbox.engine import OnOutput, SavePiece
from rollmesh.services.sandbox.engines.wire import Wire
from rollmesh.shared.domain.decoding import UNDECODABLE

_OVERHEAD_BYTES = 1 << 16
_NOTICES_MAX = 4096
"""Maximum characters that a jail adds to the output of a program."""
_CALL_BYTES = 1 << 10
_CALL_QUOTES = 40
"""Bytes besides its texts, and quotes, of the result of one of several calls."""
_QUOTES_MAX = 200 + 2 * (LOST_MAX + 1)
"""Maximum quotes of a reply without files: names and texts of its fields, and `lost`."""
_ESCAPED_MAX = 12
"""Maximum bytes of a character in JSON."""

_Text = Annotated[str, msgspec.Meta(max_length=framing.REFUSAL_BYTES_MAX)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class SessionReply(msgspec.Struct, frozen=True, kw_only=True):
    """All fields of a reply. Absent fields do not apply to the request."""

    ready: bool = False
    reason: _Text = ""
    refused: _Text = ""
    outcome: str = ""
    stdout: str = ""
    stderr: str = ""
    result: str = ""
    error_type: str = ""
    error_message: str = ""
    traceback: str = ""
    truncated: bool = False
    wall_s: _Seconds = 0.0
    cpu_s: _Seconds = 0.0
    descriptor: int = 0
    """1 or 2 if this is a piece of output, in `text`, that precedes the reply."""
    text: str = ""
    exit_status: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] = 0
    files: dict[str, str] = {}
    lost: list[Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]] = []
    too_large: bool = False
    replies: list[SessionReply] = []
    """Replies to the first of several calls."""
    changed: _Text = ""

    def decoded_files(self) -> dict[str, bytes]:
        """Return the decoded contents by path. Raises ProtocolBroken."""
        try:
            return {path: base64.b64decode(text, validate=True) for path, text in self.files.items()}
        except (binascii.Error, ValueError) as error:
            raise ProtocolBroken(f"file content is not base64: {error}") from error


class SessionGone(Exception):
    """The socket ended because pid 1 has exited or is exiting."""


class ProtocolBroken(Exception):
    """The session wrote an invalid reply."""


_decoder = msgspec.json.Decoder(SessionReply)
_encoder = msgspec.json.Encoder()


def _frame(message: dict[str, Any]) -> bytes:
    """Encode a frame like `framing.encode`, but faster."""
    body = _encoder.encode(message)
    return framing.LENGTH.pack(len(body)) + body


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """Bounds of the reply to a request."""

    frame_bytes: int
    wall_s: float
    paths: frozenset[str] = frozenset()
    files_bytes: int = 0
    num_calls: int = 0


def _decoded(data: bytearray, end: int, bounds: _Bounds) -> SessionReply:
    """Decode the frame that ends at `end`. Each string, for which the decoder creates an object, has at least one
    unescaped quote."""
    quotes = data.count(b'"', 0, end) - data.count(b'\\"', 0, end)
    if quotes > _QUOTES_MAX + 4 * len(bounds.paths) + _CALL_QUOTES * bounds.num_calls:
        raise ProtocolBroken(f"a reply with more strings than its request allows: {quotes} quotes")
    try:
        return _decoder.decode(memoryview(data)[framing.LENGTH.size : end])
    except UNDECODABLE as error:
        raise ProtocolBroken(str(error)) from error


class JailSession:
    """The service's end of one session's socket. It handles one request at a time."""

    def __init__(self, connection: socket.socket, limits: Limits, files_bytes_max: int) -> None:
        self._wire = Wire(connection)
        self._busy = False
        self._closed = False
        self._output_bytes = limits.output_bytes
        self._files_bytes_max = files_bytes_max
        self._text_max = 2 * limits.output_bytes + _NOTICES_MAX
        # There are six texts of at most output_bytes characters each.
        self._frame_bytes_max = 6 * _ESCAPED_MAX * limits.output_bytes + _OVERHEAD_BYTES

    async def receive(self, timeout_s: float) -> SessionReply:
        """Return the next reply. Raises TimeoutError, SessionGone, ProtocolBroken."""
        with self._in_use():
            async with asyncio.timeout(timeout_s):
                return await self._read(self._bounds({}, timeout_s))

    async def request(
        self, message: dict[str, Any], timeout_s: float, on_output: OnOutput | None = None
    ) -> SessionReply:
        """Send a request and return its reply. Pieces of output before it go to `on_output`, in total at most four
        times the retained bytes of a text: two descriptors, each with Python's own writes and those of child processes.

        Raises TimeoutError, SessionGone, ProtocolBroken.
        """
        bounds = self._bounds(message, timeout_s)
        with self._in_use():
            async with asyncio.timeout(timeout_s):
                await self._send(_frame(message))
                data = bytearray()
                if on_output is not None:
                    data = await self._pass_on(on_output, bounds)
                return await self._read(bounds, data)

    async def save(self, bytes_max: int, save: SavePiece, timeout_s: float) -> SessionReply:
        """Request a snapshot, pass its records to `save`, and return the reply. Raises the errors of `request` and of
        `save`."""
        with self._in_use():
            async with asyncio.timeout(timeout_s):
                await self._send(_frame({"verb": "snapshot", "bytes_max": bytes_max}))
                data = await self._records(bytes_max, save)
                return await self._read(self._bounds({}, timeout_s), data)

    async def restore(self, snapshot: AsyncIterator[bytes], timeout_s: float) -> SessionReply:
        """Send a snapshot to a fresh session. Raises the errors of `request` and of `snapshot`."""
        with self._in_use():
            async with asyncio.timeout(timeout_s):
                await self._send(_frame({"verb": "restore"}))
                async for piece in snapshot:
                    await self._send(piece)
                return await self._read(self._bounds({}, timeout_s))

    @property
    def quiet(self) -> bool:
        """Whether the socket is open and has no unrequested data."""
        return not self._closed and self._wire.quiet

    def close(self) -> None:
        """Close the socket; a request in progress fails with SessionGone.

        The descriptor is closed only when no request waits on it. Otherwise the event loop would continue to watch the
        number, which another session may soon use.
        """
        self._closed = True
        if self._busy:
            self._wire.shutdown()
        else:
            self._wire.close()

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        assert not self._busy, "one request at a time"
        if self._closed:
            raise SessionGone("closed")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            if self._closed:
                self._wire.close()

    async def _send(self, data: bytes) -> None:
        try:
            await self._wire.send(data)
        except OSError as error:
            raise SessionGone(str(error)) from error

    async def _records(self, bytes_max: int, save: SavePiece) -> bytearray:
        """Pass both sections to `save` on arrival. Return the bytes read after them, which begin the reply."""
        data, room, num_ended = bytearray(), bytes_max, 0
        while num_ended < NUM_SECTIONS:
            data = await self._piece(records.LENGTH.size, data)
            (size,) = records.LENGTH.unpack_from(data)
            if size == records.ABORT:
                return data[records.LENGTH.size :]
            end = records.LENGTH.size + size
            room -= end
            if size > records.RECORD_BYTES or room < 0:
                raise ProtocolBroken("the records of the snapshot exceed the allowed length")
            data = await self._piece(end, data)
            await save(bytes(data[:end]))
            del data[:end]
            num_ended += size < records.RECORD_BYTES
        return data

    async def _pass_on(self, on_output: OnOutput, bounds: _Bounds) -> bytearray:
        """Pass on pieces of output until another frame arrives. Return that frame's bytes."""
        data, room = bytearray(), 4 * self._output_bytes
        while True:
            end, data = await self._whole_frame(bounds, data)
            piece = _decoded(data, end, bounds)
            if not piece.descriptor:
                return data
            room -= len(piece.text)
            if piece.descriptor not in (1, 2) or not piece.text or room < 0:
                raise ProtocolBroken("invalid or oversized output frame")
            on_output(piece.descriptor, piece.text)
            del data[:end]

    async def _whole_frame(self, bounds: _Bounds, data: bytearray) -> tuple[int, bytearray]:
        """Read until `data` holds a whole frame. Return the end of the frame and the data."""
        data = await self._piece(framing.LENGTH.size, data)
        (size,) = framing.LENGTH.unpack_from(data)
        if size > bounds.frame_bytes:
            raise ProtocolBroken(f"a frame of {size} bytes; at most {bounds.frame_bytes} are allowed")
        return framing.LENGTH.size + size, await self._piece(framing.LENGTH.size + size, data)

    async def _read(self, bounds: _Bounds, data: bytearray | None = None) -> SessionReply:
        end, data = await self._whole_frame(bounds, data or bytearray())
        if len(data) != end:
            raise ProtocolBroken("an unrequested frame")
        reply = _decoded(data, end, bounds)
        if reply.descriptor:
            raise ProtocolBroken("unrequested output")
        self._require_bounded(reply, bounds)
        return reply

    def _bounds(self, message: dict[str, Any], timeout_s: float) -> _Bounds:
        """Return the bounds of the reply to `message`, which must arrive within `timeout_s`."""
        if calls := message.get("calls"):  # the last result may begin when the others have the size of one
            size = 2 * self._frame_bytes_max + len(calls) * _CALL_BYTES
            return _Bounds(frame_bytes=size, wall_s=timeout_s, num_calls=len(calls))
        paths = message.get("paths") or message.get("return_paths")
        if not paths:
            return _Bounds(frame_bytes=self._frame_bytes_max, wall_s=timeout_s)
        names_bytes = _ESCAPED_MAX * (sum(map(len, paths)) + len(paths))
        return _Bounds(
            frame_bytes=self._frame_bytes_max + 2 * self._files_bytes_max + names_bytes,
            wall_s=timeout_s,
            paths=frozenset(paths),
            files_bytes=message.get("bytes_max") or message.get("files_bytes_max") or 0,
        )

    def _require_bounded(self, reply: SessionReply, bounds: _Bounds) -> None:
        """Check a reply that code in the jail may have forged: reject names and sizes that were not requested. Raises
        ProtocolBroken."""
        if not bounds.paths.issuperset(reply.files):
            raise ProtocolBroken("files that were not requested")
        if sum(len(text) * 3 // 4 - 2 for text in reply.files.values()) > bounds.files_bytes:
            raise ProtocolBroken(f"files of more than {bounds.files_bytes} bytes")
        texts = (reply.stdout, reply.stderr, reply.result, reply.error_type, reply.error_message, reply.traceback)
        if max(map(len, texts)) > self._text_max:
            raise ProtocolBroken(f"a text of more than {self._text_max} characters")
        if len(reply.lost) > LOST_MAX + 1:
            raise ProtocolBroken(f"{len(reply.lost)} lost names; at most {LOST_MAX + 1} are allowed")
        if (len(reply.replies) > bounds.num_calls) or (bounds.num_calls and not reply.replies):
            raise ProtocolBroken(f"{len(reply.replies)} results; expected 1 to {bounds.num_calls}")
        for inner in reply.replies:
            self._require_bounded(inner, _Bounds(frame_bytes=0, wall_s=bounds.wall_s))
        if reply.wall_s > bounds.wall_s:
            raise ProtocolBroken(f"{reply.wall_s} s reported for a command that took at most {bounds.wall_s} s")

    async def _piece(self, num_bytes: int, data: bytearray) -> bytearray:
        """Read until `data` has `num_bytes` bytes. A reply is the last data on the socket, so additional bytes are
        never lost silently."""
        while len(data) < num_bytes:
            try:
                piece = await self._wire.receive()
            except OSError as error:
                raise SessionGone(str(error)) from error
            if not piece:
                raise SessionGone("end of stream")
            data += piece
        return data
