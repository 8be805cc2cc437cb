"""bash with state: one interactive shell on a pseudo-terminal per session, one command after another.

The current directory, variables, functions and jobs persist from command to command. A command that is out of time gets
the signal of Ctrl-C. If it continues, its job is killed, and finally the shell. `exit` ends the shell, not the session:
the next command gets a fresh shell and a note on stderr. All processes end with the session.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator

from rollmesh.sandbox_runtime.languages import port
from rollmesh.sandbox_runtime.languages.port import ProgramRejected, Reply
from rollmesh.sandbox_runtime.languages.terminal import Mark, Shell
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.mounts import PTMX
from rollmesh.sandbox_runtime.output import Capture, Emit
from rollmesh.sandbox_runtime.program import Program

_LINE_BYTES_MAX = 1000
"""Bytes of source text per typed line: a terminal accepts 4096 bytes, and a byte needs up to four."""
_START_S = 5.0
_INTERRUPT_S = (0.1, 0.4)
"""Seconds to wait after each interrupt. The first is lost if the process is just executing another program."""
_KILL_S = 0.2
_TAIL_S = 0.02


class Bash:
    """At most one shell at a time, started by the first command."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._shell: Shell | None = None
        self._cpu_s = 0.0
        self._notice = ""

    @property
    def runs(self) -> bool:
        """Whether a shell exists and holds state."""
        return self._shell is not None

    def run(self, program: Program, wall_s: float, emit: Emit | None = None) -> Reply:
        """Run a command; see `port.Language`."""
        port.refuse_input(program)
        if "\0" in program.code:
            return port.failed("ValueError", "bash code must not contain a NUL character")
        if not os.path.exists(PTMX):
            raise ProgramRejected("this session has no terminal for bash: the host did not allow the mount in the jail")
        began_s = time.monotonic()
        capture = Capture(1, keep=self._limits.output_bytes, flood=self._limits.flood_bytes, emit=emit)
        notice, self._notice = self._notice, ""
        reply = self._type(program.code, capture, began_s + wall_s)
        text, cut = capture.take()
        return {"stdout": text, "stderr": notice, "truncated": cut, "wall_s": time.monotonic() - began_s} | reply

    def _type(self, code: str, capture: Capture, deadline_s: float) -> Reply:
        shell = self._shell or self._start()
        before_s = self._cpu_s
        shell.reset_mode()
        mark: Mark | None = None
        for line in _lines(code):
            mark, stopped = _enter(shell, line, capture, deadline_s)
            if mark is None:
                return self._lost(stopped)
            if stopped:
                return self._done(mark, before_s) | _stopped(stopped)
        assert mark is not None
        return self._done(mark, before_s)

    def _start(self) -> Shell:
        self._shell = shell = Shell(os.environ)
        ignored = Capture(1, keep=0, flood=1 << 30)
        mark, _ = _enter(shell, shell.setup_line(), ignored, time.monotonic() + _START_S)
        if mark is None:
            self._shell = None
            raise OSError(f"bash did not start (status {shell.end()})")
        self._cpu_s = 0.0
        return shell

    def _done(self, mark: Mark, before_s: float) -> Reply:
        self._cpu_s = max(before_s, mark.cpu_s)
        reply: Reply = {"outcome": port.OK, "exit_status": mark.status, "cpu_s": max(0.0, mark.cpu_s - before_s)}
        return reply | port.failed("ExitStatus", str(mark.status)) if mark.status else reply

    def _lost(self, stopped: str) -> Reply:
        """Report a shell that ended by itself or was killed because nothing else stopped the command."""
        assert self._shell is not None
        status = self._shell.end()
        self._shell = None
        how = "was killed with a command that exceeded its limits" if stopped else f"ended with status {status}"
        self._notice = f"[the shell {how}; this is a fresh one]\n"
        reply: Reply = {"exit_status": status, "outcome": port.OK}
        if stopped:
            return reply | _stopped(stopped)
        return reply | port.failed("ExitStatus", str(status)) if status else reply


def _stopped(kind: str) -> Reply:
    if kind == port.OUTPUT:
        return port.failed("OutputLimitError", "printed more than the limit", port.OUTPUT)
    return port.failed("TimeLimitError", "wall time limit reached", port.TIME)


def _lines(code: str) -> Iterator[bytes]:
    """Yield the typed lines: the code as one quoted word for `eval`, in pieces if it is long."""
    raw = code.encode("utf-8", "replace")
    pieces = [raw[at : at + _LINE_BYTES_MAX] for at in range(0, len(raw), _LINE_BYTES_MAX)] or [b""]
    if len(pieces) == 1:
        yield b"eval " + _quoted(pieces[0]) + b"\n"
        return
    yield b"__code=\n"
    for piece in pieces:
        yield b"__code+=" + _quoted(piece) + b"\n"
    yield b'eval "$__code"\n'


def _quoted(raw: bytes) -> bytes:
    """Quote as $'...', with every byte escaped on which a terminal or the quotes would act."""
    return b"$'" + b"".join(_ESCAPED[byte] for byte in raw) + b"'"


_ESCAPED = [
    bytes([byte]) if 32 <= byte < 127 and byte not in b"\\'" else f"\\{byte:03o}".encode() for byte in range(256)
]


def _enter(shell: Shell, line: bytes, capture: Capture, deadline_s: float) -> tuple[Mark | None, str]:
    """Type a line and wait for the mark. Return the mark, or None if the shell is gone, and the limit that was reached
    or an empty text."""
    os.write(shell.master, line)
    mark, alive = _wait(shell, capture, deadline_s)
    if mark is not None or not alive:
        return mark, ""
    stopped = port.OUTPUT if capture.flooded else port.TIME
    for wait_s in _INTERRUPT_S:
        if mark is None and alive:
            shell.interrupt(signal.SIGINT)
            mark, alive = _wait(shell, capture, time.monotonic() + wait_s, flood=False)
    if mark is None and alive and shell.busy_with_job:
        shell.interrupt(signal.SIGKILL)
        mark, alive = _wait(shell, capture, time.monotonic() + _KILL_S, flood=False)
    return mark, stopped


def _wait(shell: Shell, capture: Capture, deadline_s: float, *, flood: bool = True) -> tuple[Mark | None, bool]:
    """Wait for the mark, the end of the shell, the deadline, or too much output. Return the mark and whether the shell
    still runs."""
    poll = select.poll()
    poll.register(shell.master, select.POLLIN)
    poll.register(shell.pidfd, select.POLLIN)
    while (left_s := deadline_s - time.monotonic()) > 0 and not (flood and capture.flooded):
        ready = {fd for fd, _ in poll.poll(left_s * 1000 + 1)}
        if shell.master in ready:
            mark, alive = _read(shell, capture)
            if mark is not None or not alive:
                return mark, alive
        elif shell.pidfd in ready:
            return _read_remaining(shell, capture)
    return None, True


def _read(shell: Shell, capture: Capture) -> tuple[Mark | None, bool]:
    try:
        return shell.read(capture), True
    except BlockingIOError:
        return None, True
    except OSError:  # no process has the terminal open
        return None, False


def _read_remaining(shell: Shell, capture: Capture) -> tuple[None, bool]:
    """Wait briefly for the shell's last output, because the kernel delivers writes to a terminal asynchronously."""
    poll = select.poll()
    poll.register(shell.master, select.POLLIN)
    until_s = time.monotonic() + 10 * _TAIL_S  # a background job may print forever
    while time.monotonic() < until_s and not capture.flooded and poll.poll(_TAIL_S * 1000):
        _, alive = _read(shell, capture)
        if not alive:
            break
    return None, False
