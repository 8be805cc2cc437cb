"""Snapshot and restore in the jail: the files and then the Python state, as two sections of records on the session's
socket.

    snapshot  request -> records -> reply {lost} or {refused, too_large}
    restore   request, records -> reply {} or {refused}

Both run inside jails and rely on nothing but the jail: see `tree` and `state`. A restore is the first request of a
fresh session. If it fails, the service ends the session. A partly read stream is read to its end before the reply, so
that the next request is found.
"""

from __future__ import annotations

import io
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollmesh.sandbox_runtime import framing, state, tree
from rollmesh.sandbox_runtime.interpreter import Interpreter
from rollmesh.sandbox_runtime.records import RecordWriter, SectionReader, TooLarge

VERBS = frozenset({"snapshot", "restore"})
NUM_SECTIONS = 2

LOST_MAX = 200
"""Maximum number of names in a reply's `lost`; one more entry gives the number of omitted names."""
NAME_CHARS_MAX = 120
"""Maximum characters of each name."""
_READ_BYTES = 1 << 16


def answer(
    request: framing.Message,
    connection: socket.socket,
    interpreter: Interpreter,
    base: Mapping[str, Any],
    also_lost: Sequence[str] = (),
) -> framing.Message:
    """Execute one of `VERBS`. `base` contains what the profile put into every namespace. `also_lost` names other state
    that the session cannot save."""
    pid = os.getpid()
    try:
        if request["verb"] == "snapshot":
            return _save(connection, request["bytes_max"], interpreter.namespace, base, also_lost)
        return _restore(connection, interpreter, base)
    finally:
        if os.getpid() != pid:
            os._exit(1)  # a child that a foreign __reduce__ forked must not reply for the session


def _save(
    connection: socket.socket,
    bytes_max: int,
    namespace: dict[str, Any],
    base: Mapping[str, Any],
    also_lost: Sequence[str],
) -> framing.Message:
    writer = RecordWriter(connection.sendall, bytes_max)
    try:
        lost = tree.pack(writer)
        writer.end_section()
        lost += state.save(namespace, base, writer)
        writer.end_section()
    except BaseException as error:  # noqa: BLE001 - foreign code runs while it is pickled
        writer.abort()
        too_large = isinstance(error, TooLarge)
        return framing.refusal("too large" if too_large else _described(error)) | {"too_large": too_large}
    return {"lost": _clipped([*also_lost, *lost])}


def _clipped(lost: list[str]) -> list[str]:
    names = [name[:NAME_CHARS_MAX].encode("utf-8", "replace").decode() for name in lost[:LOST_MAX]]
    return [*names, f"<{len(lost) - LOST_MAX} more>"] if len(lost) > LOST_MAX else names


def _restore(connection: socket.socket, interpreter: Interpreter, base: Mapping[str, Any]) -> framing.Message:
    def load(source: io.BufferedReader) -> None:
        interpreter.num_calls = state.load(interpreter.namespace, base, source)

    readers: tuple[Callable[[io.BufferedReader], None], ...] = (tree.unpack, load)
    refused = ""
    for read in readers:
        section = SectionReader(connection)
        try:
            if not refused:
                read(io.BufferedReader(section, _READ_BYTES))
        except Exception as error:  # noqa: BLE001 - an archive can be wrong in any way
            refused = _described(error)
        section.skip()
    return framing.refusal(refused) if refused else {}


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
