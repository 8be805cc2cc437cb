"""One session as the service sees it: requests and replies on its socket, under a deadline. What it replies is hostile.

Replies are bounded in length before they are read, in the number of their strings before they are decoded into a strict schema, and in
every field before they are returned. A deadline passed, a reply that does not fit or a cancelled request ends the session: afterwards
its next answer cannot be foreseen.
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

_OVERHEAD_BYTES = 1 << 16
_NOTICES_MAX = 4096
"""Characters that a jail adds of its own to what a program printed."""
_QUOTES_MAX = 200 + 2 * (LOST_MAX + 1)
"""Of a reply without files: of the names and texts of its fields, and of `lost`."""
_ESCAPED_MAX = 12
"""Bytes of a character in JSON."""

_Text = Annotated[str, msgspec.Meta(max_length=framing.REFUSAL_BYTES_MAX)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class SessionReply(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a session may say; absent fields have no meaning for the request at hand."""

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
    """1 or 2: no reply but a piece of output ahead of it, in `text`."""
    text: str = ""
    exit_status: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] = 0
    files: dict[str, str] = {}
    lost: list[Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]] = []
    too_large: bool = False

    def decoded_files(self) -> dict[str, bytes]:
        """Their content. Raises ProtocolBroken."""
        try:
            return {path: base64.b64decode(text, validate=True) for path, text in self.files.items()}
        except (binascii.Error, ValueError) as error:
            raise ProtocolBroken(f"file content is not base64: {error}") from error


class SessionGone(Exception):
    """The socket ended: pid 1 is dead or dying."""


class ProtocolBroken(Exception):
    """The session wrote something that is no reply."""


_decoder = msgspec.json.Decoder(SessionReply)
_encoder = msgspec.json.Encoder()


def _frame(message: dict[str, Any]) -> bytes:
    """As `framing.encode`, faster."""
    body = _encoder.encode(message)
    return framing.LENGTH.pack(len(body)) + body


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """What the reply to a request may hold."""

    frame_bytes: int
    wall_s: float
    paths: frozenset[str] = frozenset()
    files_bytes: int = 0


def _decoded(data: bytearray, end: int, paths: frozenset[str] = frozenset()) -> SessionReply:
    """The frame that ends there. Every string, of which a decoder makes an object, shows at least one quote that is not escaped."""
    quotes = data.count(b'"', 0, end) - data.count(b'\\"', 0, end)
    if quotes > _QUOTES_MAX + 4 * len(paths):
        raise ProtocolBroken(f"a reply of more strings than its request has answers: {quotes} quotes")
    try:
        return _decoder.decode(memoryview(data)[framing.LENGTH.size : end])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolBroken(str(error)) from error


class JailSession:
    """The service's end of one session's socket. One request at a time."""

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
        """The next reply. Raises TimeoutError, SessionGone, ProtocolBroken."""
        with self._in_use():
            async with asyncio.timeout(timeout_s):
                return await self._read(self._bounds({}, timeout_s))

    async def request(
        self, message: dict[str, Any], timeout_s: float, on_output: OnOutput | None = None
    ) -> SessionReply:
        """Send a request, return its reply; pieces of output ahead of it go to `on_output`, together at most four times what the
        session keeps of a text: two descriptors, each with Python's own writes and its children's.

        Raises TimeoutError, SessionGone, ProtocolBroken.
        """
        provided = self._bounds(message, timeout_s)
        with self._in_use():
            async with asyncio.timeout(timeout_s):
                await self._send(_frame(message))
                data = bytearray()
                if on_output is not None:
                    data = await self._pass_on(on_output, provided)
                return await self._read(provided, data)

    async def save(self, bytes_max: int, save: SavePiece, timeout_s: float) -> SessionReply:
        """Request a snapshot, hand its records to `save`, return the reply. Raises as `request`, and what `save` raises."""
        with self._in_use():
            async with asyncio.timeout(timeout_s):
                await self._send(_frame({"verb": "snapshot", "bytes_max": bytes_max}))
                data = await self._records(bytes_max, save)
                return await self._read(self._bounds({}, timeout_s), data)

    async def restore(self, snapshot: AsyncIterator[bytes], timeout_s: float) -> SessionReply:
        """Send a snapshot into a fresh session. Raises as `request`, and what `snapshot` raises."""
        with self._in_use():
            async with asyncio.timeout(timeout_s):
                await self._send(_frame({"verb": "restore"}))
                async for piece in snapshot:
                    await self._send(piece)
                return await self._read(self._bounds({}, timeout_s))

    @property
    def quiet(self) -> bool:
        """Whether the session is there and owes nothing it was not asked for."""
        return not self._closed and self._wire.quiet

    def close(self) -> None:
        """Give up the socket; a request in progress ends with SessionGone.

        Its descriptor is closed only when nobody waits on it: the loop would go on watching the number, which may soon be
        another session's.
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
        """Pass on both sections as they come; what was read behind them is the beginning of the reply."""
        data, room, num_ended = bytearray(), bytes_max, 0
        while num_ended < NUM_SECTIONS:
            data = await self._piece(records.LENGTH.size, data)
            (size,) = records.LENGTH.unpack_from(data)
            if size == records.ABORT:
                return data[records.LENGTH.size :]
            end = records.LENGTH.size + size
            room -= end
            if size > records.RECORD_BYTES or room < 0:
                raise ProtocolBroken("the snapshot's records are longer than allowed")
            data = await self._piece(end, data)
            await save(bytes(data[:end]))
            del data[:end]
            num_ended += size < records.RECORD_BYTES
        return data

    async def _pass_on(self, on_output: OnOutput, provided: _Bounds) -> bytearray:
        """Take pieces of output until a frame is none; that frame's bytes."""
        data, room = bytearray(), 4 * self._output_bytes
        while True:
            end, data = await self._whole_frame(provided, data)
            piece = _decoded(data, end, provided.paths)
            if not piece.descriptor:
                return data
            room -= len(piece.text)
            if piece.descriptor not in (1, 2) or not piece.text or room < 0:
                raise ProtocolBroken("output that is none, or more than is kept")
            on_output(piece.descriptor, piece.text)
            del data[:end]

    async def _whole_frame(self, provided: _Bounds, data: bytearray) -> tuple[int, bytearray]:
        """`data` read on until it holds a frame, and where that ends."""
        data = await self._piece(framing.LENGTH.size, data)
        (size,) = framing.LENGTH.unpack_from(data)
        if size > provided.frame_bytes:
            raise ProtocolBroken(f"a frame of {size} bytes; at most {provided.frame_bytes} are allowed")
        return framing.LENGTH.size + size, await self._piece(framing.LENGTH.size + size, data)

    async def _read(self, provided: _Bounds, data: bytearray | None = None) -> SessionReply:
        end, data = await self._whole_frame(provided, data or bytearray())
        if len(data) != end:
            raise ProtocolBroken("an unasked frame")
        reply = _decoded(data, end, provided.paths)
        if reply.descriptor:
            raise ProtocolBroken("unasked output")
        self._require_bounded(reply, provided)
        return reply

    def _bounds(self, message: dict[str, Any], timeout_s: float) -> _Bounds:
        """Of the reply to `message`, which comes within `timeout_s`."""
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

    def _require_bounded(self, reply: SessionReply, provided: _Bounds) -> None:
        """Code in the jail can write replies itself: names and sizes that were not asked for end here. Raises ProtocolBroken."""
        if not provided.paths.issuperset(reply.files):
            raise ProtocolBroken("files that were not asked for")
        if sum(len(text) * 3 // 4 - 2 for text in reply.files.values()) > provided.files_bytes:
            raise ProtocolBroken(f"files of more than {provided.files_bytes} bytes")
        texts = (reply.stdout, reply.stderr, reply.result, reply.error_type, reply.error_message, reply.traceback)
        if max(map(len, texts)) > self._text_max:
            raise ProtocolBroken(f"a text of more than {self._text_max} characters")
        if len(reply.lost) > LOST_MAX + 1:
            raise ProtocolBroken(f"{len(reply.lost)} lost names; at most {LOST_MAX + 1} are allowed")
        if reply.wall_s > provided.wall_s:
            raise ProtocolBroken(f"a command of {reply.wall_s} s that was answered within {provided.wall_s} s")

    async def _piece(self, num_bytes: int, data: bytearray) -> bytearray:
        """Read on until `data` has that many bytes. Nothing follows a reply, so more than asked for is never lost silently."""
        while len(data) < num_bytes:
            try:
                piece = await self._wire.receive()
            except OSError as error:
                raise SessionGone(str(error)) from error
            if not piece:
                raise SessionGone("end of stream")
            data += piece
        return data
