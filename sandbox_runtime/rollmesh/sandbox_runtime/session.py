"""A session's pid 1: contained first, then a loop that answers the service's frames until its socket ends.

The service sends one request at a time and reads one reply to each; the first frame is sent unasked and says whether the jail
was made. Verbs: run, call, put, get. Files are handled in here, inside the jail, so that path tricks reach no further
than the session's own directory.
"""

from __future__ import annotations

import base64
import os
import socket
from collections.abc import Mapping
from typing import Any, NoReturn

from rollmesh.sandbox_runtime import contain, framing
from rollmesh.sandbox_runtime.interpreter import Interpreter
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.mounts import PRIVATE_DIR


def serve_session(ground: contain.Ground, cell: contain.Cell, namespace: Mapping[str, Any]) -> NoReturn:
    """Contain this process and serve; never returns into the zygote's code, whatever happens."""
    try:
        _contain_and_serve(ground, cell, namespace)
    finally:
        os._exit(0)


def _contain_and_serve(ground: contain.Ground, cell: contain.Cell, namespace: Mapping[str, Any]) -> None:
    try:
        contain.contain_session(ground, cell)
    except contain.ContainmentError as error:
        _report_refusal(cell.socket_fd, str(error))
        return
    connection = socket.socket(fileno=contain.SOCKET_FD)
    interpreter = Interpreter(namespace, cell.limits)
    connection.sendall(framing.encode({"ready": True}))
    while (request := framing.receive(connection)) is not None:
        connection.sendall(framing.encode(_answer(interpreter, request, cell.limits)))


def _report_refusal(socket_fd: int, reason: str) -> None:
    """Write to wherever the socket is by now: containment may have failed before or after moving it."""
    frame = framing.encode({"ready": False, "reason": reason})
    for fd in (socket_fd, contain.SOCKET_FD):
        try:
            os.write(fd, frame)
            return
        except OSError:
            continue


def _answer(interpreter: Interpreter, request: framing.Message, limits: Limits) -> framing.Message:
    verb = request["verb"]
    wall_s = float(request.get("wall_s") or limits.call_s)
    if verb == "run":
        return interpreter.run(request["code"], wall_s)
    if verb == "call":
        if not interpreter.has_function(request["function"]):
            return {"refused": f"no function {request['function']!r} in this session"}
        return interpreter.call(request["function"], request["arguments"], wall_s)
    try:
        return _put(request["files"]) if verb == "put" else _get(request["paths"], request["bytes_max"])
    except (OSError, ValueError) as error:
        return {"refused": str(error)}


def _put(files: Mapping[str, str]) -> framing.Message:
    for path, content in files.items():
        target = os.path.join(PRIVATE_DIR, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(base64.b64decode(content))
    return {"files": {}}


def _get(paths: list[str], bytes_max: int) -> framing.Message:
    """Read regular files; nothing is followed into a pipe or device that would never end."""
    files: dict[str, str] = {}
    room = bytes_max
    for path in paths:
        target = os.path.join(PRIVATE_DIR, path)
        if not os.path.isfile(target):
            raise ValueError(f"{path}: no such file")
        with open(target, "rb") as file:
            content = file.read(room + 1)
        room -= len(content)
        if room < 0:
            raise ValueError(f"{path}: the files asked for exceed {bytes_max} bytes together")
        files[path] = base64.b64encode(content).decode()
    return {"files": files}
