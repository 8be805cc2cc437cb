"""A session's pid 1: it contains itself and then serves requests of the service until its socket ends.

The service sends one request at a time and reads one reply to each, preceded by frames of output if it requested them.
The first frame is sent without a request and reports whether the jail exists. Verbs: run, call, put, get; `snapshot`
implements snapshot and restore, and `stateless` calls.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from rollmesh.sandbox_runtime import contain, files, framing, program, random_state, snapshot, stateless
from rollmesh.sandbox_runtime.interpreter import Interpreter
from rollmesh.sandbox_runtime.languages.port import ProgramRejected
from rollmesh.sandbox_runtime.languages.registry import Languages
from rollmesh.sandbox_runtime.limits import Limits


def serve_session(context: contain.ZygoteContext, spec: contain.SessionSpec, namespace: Mapping[str, Any]) -> NoReturn:
    """Contain this process and serve requests. Never returns into the zygote's code, whatever happens."""
    try:
        _contain_and_serve(context, spec, namespace)
    finally:
        os._exit(0)


def _contain_and_serve(context: contain.ZygoteContext, spec: contain.SessionSpec, namespace: Mapping[str, Any]) -> None:
    try:
        contain.contain_session(context, spec)
    except contain.ContainmentError as error:
        _report_refusal(spec.socket_fd, str(error))
        return
    answer_all(socket.socket(fileno=contain.SOCKET_FD), namespace, spec.limits)


def answer_all(connection: socket.socket, namespace: Mapping[str, Any], limits: Limits) -> None:
    """Report that the session is ready, then answer requests until its socket ends."""
    random_state.seed_generators()
    interpreter = Interpreter(namespace, limits)
    languages = Languages(interpreter, limits)
    watch: stateless.StateWatch | None = None
    connection.sendall(framing.encode({"ready": True}))
    while (request := framing.receive(connection)) is not None:
        if request["verb"] in snapshot.VERBS:
            reply = snapshot.answer(request, connection, interpreter, namespace, languages.unsaved)
        elif request["verb"] == stateless.VERB:
            watch = watch or stateless.StateWatch(namespace)  # nothing else runs in a session with such calls
            reply = stateless.answer(request, interpreter, watch, limits)
        else:
            reply = _answer(interpreter, languages, request, limits)
        connection.sendall(framing.encode(reply))


def _report_refusal(socket_fd: int, reason: str) -> None:
    """Write the error to the socket's current descriptor: containment may have failed before or after moving it."""
    frame = framing.encode({"ready": False, "reason": reason[: framing.REFUSAL_BYTES_MAX]})
    for fd in (socket_fd, contain.SOCKET_FD):
        try:
            os.write(fd, frame)
            return
        except OSError:
            continue


def _answer(
    interpreter: Interpreter, languages: Languages, request: framing.Message, limits: Limits
) -> framing.Message:
    wall_s = float(request.get("wall_s") or limits.call_s)
    match request["verb"]:
        case "run":
            return _run(languages, request, wall_s)
        case "call":
            if not interpreter.has_function(request["function"]):
                return framing.refusal(f"no function {request['function']!r} in this session")
            return interpreter.call(request["function"], request["arguments"], wall_s)
        case "put":
            return _refusable(lambda: files.put(request["files"]))
        case "get":
            return _refusable(lambda: files.get(request["paths"], request["bytes_max"]))
        case verb:
            return framing.refusal(f"unknown verb {verb!r}")


def _run(languages: Languages, request: framing.Message, wall_s: float) -> framing.Message:
    wanted = program.from_message(request)
    try:
        reply = languages.run(wanted, wall_s, _emit if request["stream"] else None)
    except ProgramRejected as error:
        return framing.refusal(str(error))
    if wanted.return_paths:
        reply["files"], cut = files.collect(wanted.return_paths, request["files_bytes_max"])
        reply["truncated"] = reply.get("truncated", False) or cut
    return reply


def _emit(descriptor: int, text: str) -> None:
    """Send a frame of output before the reply. The service reads regardless of its client, so this hardly ever
    blocks."""
    plain = text.encode("utf-8", "replace").decode()
    frame = memoryview(framing.encode({"descriptor": descriptor, "text": plain}))
    while frame:
        frame = frame[os.write(contain.SOCKET_FD, frame) :]


def _refusable(action: Callable[[], dict[str, str]]) -> framing.Message:
    try:
        return {"files": action()}
    except (OSError, ValueError) as error:
        return framing.refusal(str(error))
