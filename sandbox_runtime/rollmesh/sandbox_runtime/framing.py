"""Frames between the service and a session: 4 bytes little-endian length, then JSON in UTF-8.

JSON on purpose: what comes out of a jail is hostile and must never be unpickled. The service bounds the length before it
allocates. Control messages between service and zygote are single JSON packets with descriptors attached.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from rollmesh.sandbox_runtime.output import clip

LENGTH = struct.Struct("<I")
PACKET_BYTES_MAX = 8192
"""A control packet; they carry numbers and short names only."""
FDS_MAX = 8
REFUSAL_BYTES_MAX = 1000
"""Of the text that says why a request was refused, or why a session did not begin."""

Message = dict[str, Any]

_encoder = json.JSONEncoder(separators=(",", ":"))
_decoder = json.JSONDecoder()
"""Made once: `json.dumps` with separators makes one per call, and what a fresh fork executes costs it a copy of each page it touches."""


def encode(message: Message) -> bytes:
    """One frame."""
    body = _encoder.encode(message).encode()
    return LENGTH.pack(len(body)) + body


def refusal(reason: str) -> Message:
    """The reply to a request that is refused."""
    return {"refused": clip(reason, REFUSAL_BYTES_MAX)[0]}


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    """Blocking read of a whole piece; None at the end of the stream."""
    data = bytearray()
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def receive(connection: socket.socket) -> Message | None:
    """Blocking read of one frame, for the jail's side, which trusts the service; None when the service is gone."""
    header = receive_exactly(connection, LENGTH.size)
    body = header and receive_exactly(connection, LENGTH.unpack(header)[0])
    return _decoded(body) if body else None


def receive_packet(connection: socket.socket) -> tuple[Message | None, list[int]]:
    """One control packet and its descriptors; (None, []) when the other side is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(connection, PACKET_BYTES_MAX, FDS_MAX)
    except ConnectionResetError:  # closed with packets of ours unread
        return None, []
    return (_decoded(data) if data else None), list(fds)


def send_packet(connection: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    """One control packet, descriptors attached."""
    data = _encoder.encode(message).encode()
    assert len(data) <= PACKET_BYTES_MAX
    if fds:
        socket.send_fds(connection, [data], fds)
    else:
        connection.send(data)


def _decoded(data: bytes) -> Message:
    """Raises ValueError."""
    message: Message = _decoder.decode(data.decode())
    return message
