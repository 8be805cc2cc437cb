"""Frames between the service and a session: 4 bytes little-endian length, then JSON in UTF-8.

JSON is used because data from a jail is hostile and must never be unpickled. The service bounds the length before it
allocates memory. Control messages between service and zygote are single JSON packets with attached descriptors.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from rollmesh.sandbox_runtime.output import clip

LENGTH = struct.Struct("<I")
PACKET_BYTES_MAX = 8192
"""Maximum bytes of a control packet, which contains only numbers and short names."""
FDS_MAX = 8
REFUSAL_BYTES_MAX = 1000
"""Maximum bytes of the reason why a request was rejected or a session did not start."""

Message = dict[str, Any]

_encoder = json.JSONEncoder(separators=(",", ":"))
_decoder = json.JSONDecoder()
"""Created once: `json.dumps` with separators creates an encoder per call, and code that a fresh fork executes costs it
a copy of each page that it touches."""


def encode(message: Message) -> bytes:
    """Encode one frame."""
    body = _encoder.encode(message).encode()
    return LENGTH.pack(len(body)) + body


def refusal(reason: str) -> Message:
    """Return the reply to a rejected request."""
    return {"refused": clip(reason, REFUSAL_BYTES_MAX)[0]}


def receive_exactly(connection: socket.socket, num_bytes: int) -> bytes | None:
    """Read exactly `num_bytes`, blocking; None at the end of the stream."""
    data = bytearray()
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            return None
        data += piece
    return bytes(data)


def receive(connection: socket.socket) -> Message | None:
    """Read one frame, blocking; None when the service is gone. For the jail's side, which trusts the service."""
    header = receive_exactly(connection, LENGTH.size)
    body = header and receive_exactly(connection, LENGTH.unpack(header)[0])
    return _decoded(body) if body else None


def receive_packet(connection: socket.socket) -> tuple[Message | None, list[int]]:
    """Receive one control packet and its descriptors; (None, []) when the peer is gone."""
    try:
        data, fds, _, _ = socket.recv_fds(connection, PACKET_BYTES_MAX, FDS_MAX)
    except ConnectionResetError:  # closed while our packets were unread
        return None, []
    return (_decoded(data) if data else None), list(fds)


def send_packet(connection: socket.socket, message: Message, fds: tuple[int, ...] = ()) -> None:
    """Send one control packet with attached descriptors."""
    data = _encoder.encode(message).encode()
    assert len(data) <= PACKET_BYTES_MAX
    if fds:
        socket.send_fds(connection, [data], fds)
    else:
        connection.send(data)


def _decoded(data: bytes) -> Message:
    """Decode a message. Raises ValueError."""
    message: Message = _decoder.decode(data.decode())
    return message
