"""A child process of a session: feed its input, capture its bounded output, and kill its whole process group at the
deadline.

Only the child itself is awaited, not grandchildren that hold its pipes open. They are killed with the child's process
group. A process that has left the group runs until the session ends.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollmesh.sandbox_runtime.languages import port
from rollmesh.sandbox_runtime.output import Capture
from rollmesh.sandbox_runtime.stdin_file import stdin_file

if TYPE_CHECKING:
    import subprocess

_PIECE_BYTES = 1 << 16
_TAIL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildExit:
    """Exit of a child. `stopped` is the limit for which it was killed (port.TIME, port.OUTPUT), or empty."""

    status: int
    """Exit status, or minus the signal."""
    stopped: str
    cpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Captures of a child's output. One capture for both merges them."""

    stdout: Capture
    stderr: Capture

    @property
    def flooded(self) -> bool:
        """Whether more was printed than the flood limit."""
        return self.stdout.flooded or self.stderr.flooded


def run_child(
    argv: Sequence[str],
    streams: Streams,
    *,
    cwd: str,
    wall_s: float,
    stdin: bytes = b"",
    prepare: Callable[[], None] | None = None,
) -> ChildExit:
    """Execute a program and wait at most `wall_s` for it. `prepare` runs in the child before the program. Raises
    OSError if it cannot start."""
    import subprocess  # imported late: it imports `threading`, whose work after a fork would slow every session

    with stdin_file(stdin) as source:
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=prepare,  # noqa: PLW1509 - the session is single-threaded unless its own code made it otherwise
        )
        return _wait(process, streams, wall_s)


def _wait(process: subprocess.Popen[bytes], streams: Streams, wall_s: float) -> ChildExit:
    pipes = _Pipes(process, streams)
    try:
        stopped = pipes.serve(time.monotonic() + wall_s)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the pid is still valid
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        pipes.drain()
        pipes.close()
    return ChildExit(status=process.returncode, stopped=stopped, cpu_s=usage.ru_utime + usage.ru_stime)


def cpu_bound(cpu_s: float, address_space: bool = False) -> Callable[[], None]:
    """Return a function for `prepare` that sets a CPU limit of this process alone, and the full address space if
    requested."""

    def prepare() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        seconds = max(1, round(cpu_s))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard < 0 else min(seconds, hard), hard))
        if address_space:
            full_address_space()

    return prepare


def full_address_space() -> None:
    """Raise the limit to the profile's address space, which may exceed the session's memory."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


class _Pipes:
    """Both output pipes of a child, which are polled together."""

    def __init__(self, process: subprocess.Popen[bytes], streams: Streams) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._files = [process.stdout, process.stderr]
        self._captures = {process.stdout.fileno(): streams.stdout, process.stderr.fileno(): streams.stderr}
        self._streams = streams
        self._pidfd = os.pidfd_open(process.pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        for fd in self._captures:
            os.set_blocking(fd, False)
            self._poll.register(fd, select.POLLIN)

    def serve(self, deadline_s: float) -> str:
        """Read until the child has exited. Return the limit that was reached before, or an empty text."""
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return port.TIME
            for fd, _ in self._poll.poll(left_s * 1000 + 1):
                if fd == self._pidfd:
                    return ""
                if not self._read(fd):
                    self._poll.unregister(fd)
            if self._streams.flooded:
                return port.OUTPUT

    def drain(self) -> None:
        """Read the rest of the pipes without waiting for other processes that hold them open."""
        until_s = time.monotonic() + _TAIL_S
        for fd in self._captures:
            while time.monotonic() < until_s and self._read(fd):
                pass

    def close(self) -> None:
        os.close(self._pidfd)
        for file in self._files:
            file.close()

    def _read(self, fd: int) -> bool:
        """Read one piece. Return False if nothing is available."""
        try:
            data = os.read(fd, _PIECE_BYTES)
        except BlockingIOError:
            return False
        self._captures[fd].feed(data)
        return bool(data)
