"""Runs the candidate's Python file as a program: a fork of the warm session with the test's standard input.

What it prints is the session's own output, bounded and cut there. Its end is told as a status; nothing it does to this process
can make more of that than a status. Nothing of it outlives the call.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import runpy
import signal
import sys
import traceback
from typing import NoReturn

from rollmesh.sandbox_runtime.surroundings import is_alone, private_dir

OUT_OF_MEMORY = 86
"""Exit status that stands for an uncaught MemoryError."""
_DESCRIPTORS_MAX = 1024


def run_program(path: str, stdin: str, cpu_s: str) -> str:
    """Run it with `cpu_s` CPU seconds, a number as text. JSON of `{"status": N}`: the exit status, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        _be_program(os.path.join(private_dir(), path), stdin, float(cpu_s))
    try:
        _, status = os.waitpid(child, 0)
    finally:
        _end_all(child)
    return json.dumps({"status": os.waitstatus_to_exitcode(status)})


def _end_all(child: int) -> None:
    """Kill and reap whatever the program left: in a session of its own every process but this one, elsewhere its process group."""
    everybody = os.getpid() == 1 or is_alone()
    for kill, whom in ((os.kill, child), (os.kill, -1) if everybody else (os.killpg, child)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(whom, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1 if everybody else -child, 0)


def _be_program(path: str, stdin: str, cpu_s: float) -> NoReturn:
    status = 1
    try:
        os.setsid()
        _arrange(stdin, cpu_s)
        status = _execute(path)
    finally:
        os._exit(status)


def _arrange(stdin: str, cpu_s: float) -> None:
    """Standard streams of a program of its own, the usual signals, and its share of CPU."""
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = math.ceil(cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard < 0 else min(wanted, hard), hard))
    source = os.open(private_dir(), os.O_TMPFILE | os.O_RDWR, 0o600)
    with open(source, "w", closefd=False, encoding="utf-8") as file:
        file.write(stdin)
    os.lseek(source, 0, os.SEEK_SET)
    os.dup2(source, 0)
    os.closerange(3, _DESCRIPTORS_MAX)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - as long as the program
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _execute(path: str) -> int:
    """As the interpreter would: run, wait for threads, flush. The status."""
    sys.argv = [path]
    sys.path.insert(0, private_dir())
    sys.dont_write_bytecode = True
    status = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        status = _status_of(end)
    except MemoryError:
        status = OUT_OF_MEMORY
    except BaseException:  # noqa: BLE001 - the interpreter's own last resort: print it, end with 1
        traceback.print_exc()
        status = 1
    if (threading := sys.modules.get("threading")) is not None:  # else it has started none
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    try:
        sys.stdout.flush()
    except OSError:
        return status or 1
    return status


def _status_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1
