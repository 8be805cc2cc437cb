"""The stateful Python interpreter of one session: runs code, calls functions and reports outcomes. Runs inside the
jail.

Definitions persist between calls. The value of a trailing expression is returned as its repr. Tracebacks show only
lines of the user. Soft time limits interrupt the code with a BaseException and keep the session. The service kills code
that resists.
"""

from __future__ import annotations

import ast
import errno
import json
import linecache
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

from rollmesh.sandbox_runtime import output
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.live_output import TICK_S, LiveOutput
from rollmesh.sandbox_runtime.output import BoundedText, Emit, OutputLimitError, clip

OK, ERROR, TIME, MEMORY, PROCESSES, OUTPUT = "ok", "error", "time", "memory", "processes", "output"

_FRAMES_MAX = 20
_NAME_BYTES_MAX = 200
_OWN_FILES = (__file__, output.__file__)
"""Files of the jail's own code, whose frames are removed from tracebacks."""

Reply = dict[str, Any]
_Block = Callable[[], str | None]


class TimeLimitError(BaseException):
    """Raised in the user's code when its time is up. A BaseException, so that `except Exception` does not catch it."""


class Interpreter:
    """One namespace with bounded output streams. `namespace` contains what the profile preloaded."""

    def __init__(self, namespace: Mapping[str, Any], limits: Limits) -> None:
        self._namespace: dict[str, Any] = {**namespace, "__name__": "__main__", "__builtins__": __builtins__}
        self._limits = limits
        self.num_calls = 0
        self._armed = False
        self._live: LiveOutput | None = None
        self._deadline_s = 0.0
        self._late = ""
        self._stdout = BoundedText(1, keep=limits.output_bytes, flood=limits.flood_bytes)
        self._stderr = BoundedText(2, keep=limits.output_bytes, flood=limits.flood_bytes)
        sys.stdout, sys.stderr = self._stdout, self._stderr
        signal.signal(signal.SIGALRM, self._on_timer)
        signal.signal(signal.SIGPROF, self._on_timer)

    def run(self, code: str, wall_s: float, emit: Emit | None = None) -> Reply:
        """Execute source text. `emit` gets the output while it is printed."""
        self.num_calls += 1
        name = f"<call {self.num_calls}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        if emit is not None:
            self._live = LiveOutput(emit, self._limits.output_bytes, self._raise_late)
            self._stdout.emit = self._stderr.emit = self._live.add
        return self._guard(lambda: self._execute(code, name), wall_s)

    def call(self, function: str, arguments: Sequence[Any], wall_s: float) -> Reply:
        """Call a function of the namespace. Text is returned unchanged, None as an empty result, other values as JSON
        or else repr."""
        return self._guard(lambda: _as_text(self._namespace[function](*arguments)), wall_s)

    @property
    def namespace(self) -> dict[str, Any]:
        """The current namespace, which `run` changes."""
        return self._namespace

    def has_function(self, name: str) -> bool:
        """Return whether the namespace has a function of that name."""
        return callable(self._namespace.get(name))

    def _execute(self, code: str, name: str) -> str | None:
        body, last = _compile(code, name)
        exec(body, self._namespace)  # noqa: S102 - the jail contains it
        if last is None:
            return None
        value = eval(last, self._namespace)
        return None if value is None else repr(value)

    def _guard(self, block: _Block, wall_s: float) -> Reply:
        """Run a block under the soft limits. Every exception becomes a record here and nowhere else."""
        pid, started, cpu_before_s = os.getpid(), time.monotonic(), cpu_s()
        outcome, result, error = OK, None, None
        try:
            try:
                self._arm(wall_s)
                result = block()
            finally:
                self._disarm()
        except BaseException as raised:  # noqa: BLE001 - any exception of foreign code is its result
            outcome, error = _classify(raised), raised
        if os.getpid() != pid:
            os._exit(1)  # a child that the code forked must not reply for the session
        self._end_live()
        reply = self._reply(outcome, result, error)
        return reply | {"wall_s": time.monotonic() - started, "cpu_s": cpu_s() - cpu_before_s}

    def _arm(self, wall_s: float) -> None:
        self._armed, self._late = True, ""
        if self._live is None:
            signal.setitimer(signal.ITIMER_REAL, wall_s)
        else:
            self._deadline_s = time.monotonic() + wall_s
            signal.setitimer(signal.ITIMER_REAL, min(wall_s, TICK_S), TICK_S)
        signal.setitimer(signal.ITIMER_PROF, self._limits.cpu_s)

    def _disarm(self) -> None:
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _on_timer(self, number: int, _frame: FrameType | None) -> None:
        if not self._armed:
            return
        kind = "wall" if number == signal.SIGALRM else "CPU"
        if self._live is None or self._is_late(self._live, kind):
            self._late = self._late or kind
            self._raise_late()

    def _raise_late(self) -> None:
        raise TimeLimitError(f"{self._late} time limit reached")

    def _is_late(self, live: LiveOutput, kind: str) -> bool:
        """Check the time limits while the timer ticks for live output. Return whether to interrupt now; the interrupt
        waits while a frame is being sent."""
        if not self._late and (kind == "CPU" or time.monotonic() >= self._deadline_s):
            self._late = kind
        if live.sending:
            live.missed = bool(self._late)
            return False
        if not self._late:
            live.tick()
        return bool(self._late)

    def _end_live(self) -> None:
        if self._live is not None:
            self._stdout.emit = self._stderr.emit = None
            live, self._live = self._live, None
            live.end()

    def _reply(self, outcome: str, result: str | None, error: BaseException | None) -> Reply:
        keep = self._limits.output_bytes
        stdout, cut_stdout = self._stdout.take()
        stderr, cut_stderr = self._stderr.take()
        text, cut_result = clip(result or "", keep)
        reply: Reply = {
            "outcome": outcome, "stdout": stdout, "stderr": stderr, "result": text,
            "truncated": cut_stdout or cut_stderr or cut_result,
        }  # fmt: skip
        if error is not None:
            message, _ = clip(_message(error), keep)
            reply |= {"error_type": clip(type(error).__name__, _NAME_BYTES_MAX)[0], "error_message": message}
            reply["traceback"], _ = clip(_traceback(error), keep)
        return reply


def cpu_s() -> float:
    """Return the CPU time of this process and of the children that it has reaped."""
    own, reaped = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + reaped.ru_utime + reaped.ru_stime


def _compile(code: str, name: str) -> tuple[CodeType, CodeType | None]:
    """Compile the statements, and separately the trailing expression if there is one."""
    tree = ast.parse(code, name)
    last = None
    if tree.body and isinstance(tail := tree.body[-1], ast.Expr):
        del tree.body[-1]
        last = compile(ast.Expression(tail.value), name, "eval")
    return compile(tree, name, "exec"), last


def _as_text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)


def _classify(raised: BaseException) -> str:
    """Map an exception to an outcome. An uncaught EAGAIN or a rejected thread means the process limit: the jail has no
    sockets, and nothing else in it commonly returns EAGAIN."""
    if isinstance(raised, TimeLimitError):
        return TIME
    if isinstance(raised, OutputLimitError):
        return OUTPUT
    if isinstance(raised, MemoryError) or (isinstance(raised, OSError) and raised.errno == errno.ENOMEM):
        return MEMORY
    if isinstance(raised, BlockingIOError) and raised.errno == errno.EAGAIN:
        return PROCESSES
    if isinstance(raised, RuntimeError) and str(raised) == "can't start new thread":
        return PROCESSES
    return ERROR


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001 - a foreign __str__ may raise anything; the text is informational
        return "<no message>"


def _traceback(error: BaseException) -> str:
    try:
        shown = traceback.TracebackException.from_exception(error, limit=-_FRAMES_MAX)
        shown.stack = traceback.StackSummary.from_list([f for f in shown.stack if f.filename not in _OWN_FILES])
        return "".join(shown.format())
    except BaseException:  # noqa: BLE001 - foreign reprs and low memory
        return f"{type(error).__name__}\n"
