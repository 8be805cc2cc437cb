"""Run work of the jail in a child process, which ends at its deadline, crashes alone, and leaves nothing behind.

The child is a fork of the session's pid 1, so the modules that the profile preloaded are available. It returns one JSON
object on a pipe.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from rollmesh.sandbox_runtime import contain
from rollmesh.sandbox_runtime.languages import children, port
from rollmesh.sandbox_runtime.languages.port import Reply

_PIECE_BYTES = 1 << 16
Work = Callable[[], Reply]


def run_forked(work: Work, *, wall_s: float, cpu_s: float, bytes_max: int) -> Reply:
    """Return the result of `work`, or how it failed. More than `bytes_max` bytes of result are a failure. Raises
    OSError if it cannot start."""
    began_s = time.monotonic()
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_fd)
        _answer(work, write_fd, cpu_s)
    os.close(write_fd)
    try:
        data = _read(read_fd, began_s + wall_s, bytes_max)
    finally:
        os.close(read_fd)
        os.kill(pid, signal.SIGKILL)
        _, status, usage = os.wait4(pid, 0)
    reply = _understood(data, os.waitstatus_to_exitcode(status))
    return reply | {"wall_s": time.monotonic() - began_s, "cpu_s": usage.ru_utime + usage.ru_stime}


def _answer(work: Work, fd: int, cpu_s: float) -> NoReturn:
    """Run the work in the child. Never returns into the session's loop."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        os.close(contain.SOCKET_FD)
        children.cpu_bound(cpu_s, address_space=True)()
        try:
            reply = work()
        except MemoryError:
            reply = port.failed("MemoryError", "memory limit reached", port.MEMORY)
        data = memoryview(json.dumps(reply).encode())
        while data:
            data = data[os.write(fd, data) :]
    finally:
        os._exit(0)


def _read(fd: int, deadline_s: float, bytes_max: int) -> bytes | None:
    """Read to the end of the pipe; None if the deadline passed before."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    data = bytearray()
    while len(data) <= bytes_max:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return None
        if poll.poll(left_s * 1000 + 1):
            piece = os.read(fd, _PIECE_BYTES)
            if not piece:
                return bytes(data)
            data += piece
    return b""


def _understood(data: bytes | None, status: int) -> Reply:
    if data is None:
        return port.failed("TimeLimitError", "wall time limit reached", port.TIME)
    if data:
        reply: Reply = json.loads(data)
        return reply
    if status == -signal.SIGXCPU:
        return port.failed("TimeLimitError", "CPU time limit reached", port.TIME)
    return port.failed("Crash", f"the query's process ended with status {status} and without a result") | {
        "exit_status": status
    }
