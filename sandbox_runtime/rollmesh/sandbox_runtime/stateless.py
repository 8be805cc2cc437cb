"""Calls of stateless functions in a session that several episodes share, and the check that a call left no state.

Only functions of the profile run here. The check finds what a careless function changes: global names and small
containers of its module, default arguments, builtins, files, working directory, environment, children and threads. It
is not an isolation mechanism: a function that hides state elsewhere is not found.
"""

from __future__ import annotations

import builtins
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from types import CellType, FunctionType
from typing import Any

from rollmesh.sandbox_runtime import framing, process_env
from rollmesh.sandbox_runtime.interpreter import ERROR, OK, Interpreter, Reply
from rollmesh.sandbox_runtime.limits import Limits

VERB = "calls"
ENTRIES_MAX = 64
"""Entries of a container up to which its content is compared. Of a larger one only the length is compared."""
_CONTAINERS = (list, dict, set, bytearray)
_SIGNALS = (signal.SIGALRM, signal.SIGPROF, signal.SIGINT, signal.SIGTERM)
_WARNINGS = "__warningregistry__"
"""Name that a warning adds to the module which causes it. It is removed after the call."""
_ALWAYS = ("outcome", "result", "wall_s", "cpu_s")


def answer(request: framing.Message, interpreter: Interpreter, watch: StateWatch, limits: Limits) -> framing.Message:
    """Run the first calls of the request, at least one. The reply has their results and what the last one changed.

    The others are not begun after a call that changed state or reached a limit, after `slice_s` seconds, or when the
    results exceed the bytes of one result.
    """
    replies: list[Reply] = []
    changed, room, end_s = "", limits.output_bytes, time.monotonic() + request["slice_s"]
    for function, arguments, wall_s in request["calls"]:
        if not interpreter.has_function(function):
            replies.append(framing.refusal(f"no function {function!r} in this profile"))
            continue
        reply = interpreter.call(function, arguments, wall_s)
        replies.append({name: value for name, value in reply.items() if value or name in _ALWAYS})
        changed = watch.changed()
        room -= sum(len(value) for value in reply.values() if isinstance(value, str))
        if changed or reply["outcome"] not in (OK, ERROR) or room < 0 or time.monotonic() > end_s:
            break
    return {"replies": replies, "changed": changed}


class StateWatch:
    """The state that a fresh session has, and the first difference from it."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        """`namespace` contains the functions of the profile."""
        functions = [value for value in namespace.values() if isinstance(value, FunctionType)]
        scopes = {id(function.__globals__): function.__globals__ for function in functions}
        self._scopes = [(scope, dict(scope)) for scope in scopes.values()]
        self._builtins = dict(vars(builtins))
        self._functions = [(function, _parts(function)) for function in functions]
        self._containers = [
            (name, value, value.copy() if len(value) <= ENTRIES_MAX else len(value))
            for name, value in _containers(scopes.values(), functions)
        ]
        self._directory = process_env.private_dir()
        self._cwd = os.getcwd()
        self._environment = dict(os.environ)
        self._streams = (sys.stdout, sys.stderr)
        self._path = list(sys.path)
        self._handlers = [signal.getsignal(number) for number in _SIGNALS]

    def changed(self) -> str:
        """Return the first difference in words; empty if there is none."""
        try:
            return self._changed_names() or self._changed_process()
        except Exception as error:  # noqa: BLE001 - the values of foreign code decide whether they are equal: an array raises
            return f"a value that cannot be compared ({type(error).__name__})"

    def _changed_names(self) -> str:
        for scope, before in self._scopes:
            scope.pop(_WARNINGS, None)
            if scope != before:
                return f"global name {_first_difference(scope, before)}"
        for name, value, kept in self._containers:
            if (len(value) if isinstance(kept, int) else value) != kept:
                return f"content of {name}"
        for function, parts in self._functions:
            if _parts(function) != parts:
                return f"function {function.__name__}"
        if vars(builtins) != self._builtins:
            return f"builtin {_first_difference(vars(builtins), self._builtins)}"
        return ""

    def _changed_process(self) -> str:
        if os.getcwd() != self._cwd:
            return "working directory"
        if files := os.listdir(self._directory):
            return f"file {files[0][:100]}"
        if dict(os.environ) != self._environment:
            return f"environment variable {_first_difference(os.environ, self._environment)}"
        if (sys.stdout, sys.stderr) != self._streams or sys.path != self._path:
            return "sys.stdout, sys.stderr or sys.path"
        if [signal.getsignal(number) for number in _SIGNALS] != self._handlers:
            return "signal handler"
        if len(sys._current_frames()) != 1:
            return "thread"
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ""
        return "child process"


def _parts(function: FunctionType) -> tuple[object, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__, dict(function.__dict__)


def _containers(scopes: Any, functions: list[FunctionType]) -> Iterator[tuple[str, Any]]:
    for scope in scopes:
        yield from ((name, value) for name, value in scope.items() if _is_compared(name, value))
    for function in functions:
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
        values = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *cells)
        yield from ((f"an argument of {function.__name__}", value) for value in values if _is_compared("", value))


def _is_compared(name: str, value: object) -> bool:
    return type(value) in _CONTAINERS and name != "__builtins__"


def _first_difference(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    names = [*now.keys() ^ before.keys(), *(name for name in before if name in now and now[name] is not before[name])]
    return repr(names[0])[:100] if names else "(unknown)"
