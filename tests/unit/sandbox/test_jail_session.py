"""Bounds of a session's replies: more than was requested ends the session before it costs the service anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from rollmesh.sandbox_runtime import framing
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.snapshot import LOST_MAX, NAME_CHARS_MAX
from rollmesh.services.sandbox.engines import jail_session
from rollmesh.services.sandbox.engines.jail_session import JailSession, ProtocolBroken, SessionReply

WAIT_S = 20.0
FILES_BYTES_MAX = 1 << 20
RUN: dict[str, Any] = {"verb": "run", "files_bytes_max": FILES_BYTES_MAX}


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


async def answered(ends: tuple[socket.socket, socket.socket], message: dict[str, Any], body: bytes) -> SessionReply:
    """Return the reply to a request if the session writes `body`, whatever the request is."""
    ours, theirs = ends
    session = JailSession(ours, Limits(), FILES_BYTES_MAX)
    writing = asyncio.create_task(asyncio.to_thread(_write, theirs, framing.LENGTH.pack(len(body)) + body))
    try:
        return await session.request(message, WAIT_S)
    finally:
        session.close()
        await writing


def _write(connection: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):  # the service may stop reading
        connection.sendall(data)


def strings(count: int) -> str:
    return ",".join(['""'] * count)


@pytest.mark.parametrize(
    "body",
    [
        '{"files":{' + ",".join(f'"{number}":""' for number in range(100_000)) + "}}",
        f'{{"lost":[{strings(100_000)}]}}',
        '{"lost":[' + ",".join(['"\\\\"'] * 100_000) + "]}",
        f'{{"unknown":[{strings(100_000)}]}}',
        "{" + ",".join(['"stdout":"x"'] * 100_000) + "}",
    ],
    ids=["files", "lost", "strings that hide their quotes", "unknown field", "one field again and again"],
)
async def test_a_flood_of_strings_is_refused_before_it_is_decoded(
    ends: tuple[socket.socket, socket.socket], body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jail_session, "_decoder", None)
    with pytest.raises(ProtocolBroken, match="strings"):
        await answered(ends, RUN, body.encode())


@pytest.mark.parametrize(
    "reply",
    [
        {"refused": "A" * 12_000_000},
        {"refused": "A" * (framing.REFUSAL_BYTES_MAX + 1)},
        {"reason": "A" * (framing.REFUSAL_BYTES_MAX + 1)},
        {"error_message": "A" * 200_000},
        {"lost": ["A" * (NAME_CHARS_MAX + 1)]},
        {"lost": ["A"] * (LOST_MAX + 2)},
        {"files": {"unasked": ""}},
        {"exit_status": 1 << 31},
        {"exit_status": -(1 << 60)},
        {"wall_s": 2 * WAIT_S},
        {"wall_s": -1.0},
        {"cpu_s": 1e300},
    ],
    ids=lambda reply: f"{next(iter(reply))} {str(next(iter(reply.values())))[:12]}",
)
async def test_every_field_is_bounded(ends: tuple[socket.socket, socket.socket], reply: dict[str, Any]) -> None:
    with pytest.raises(ProtocolBroken):
        await answered(ends, RUN, json.dumps(reply).encode())


async def test_what_an_honest_session_says_fits(ends: tuple[socket.socket, socket.socket]) -> None:
    paths = [f'"{number}"' for number in range(4096)]
    text = '"\\' * (Limits().output_bytes // 2)
    sent = {"stdout": text, "stderr": text, "files": dict.fromkeys(paths, "eA=="), "lost": ["x"] * (LOST_MAX + 1)}
    reply = await answered(ends, {**RUN, "return_paths": paths}, framing.encode(sent)[framing.LENGTH.size :])
    assert (reply.stdout, len(reply.decoded_files())) == (text, 4096)


def test_a_refusal_is_cut_where_it_is_made() -> None:
    assert framing.refusal("\udcff" + "é" * 5000) == {"refused": "?" + "é" * 499}
