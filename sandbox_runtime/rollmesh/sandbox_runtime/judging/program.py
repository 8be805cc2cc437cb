"""Run the candidate's Python file as a program: a fork of the warm session with the test's standard input.

The interpreter itself executes the file as its main program and then finalizes as at the end of `python FILE`: it joins
threads, calls the functions of `atexit`, flushes the streams and destroys the remaining objects. The output of the
program is the session's own output, which is bounded and cut there. Its end is reported as a status, and nothing that
it does to this process can change more than the status. None of its processes outlives the call.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import json
import math
import os
import resource
import signal
import sys
from types import ModuleType
from typing import NoReturn

from rollmesh.sandbox_runtime.process_env import kill_is_confined, private_dir
from rollmesh.sandbox_runtime.stdin_file import stdin_file

_DESCRIPTORS_MAX = 1024


def run_program(path: str, stdin: str, cpu_s: str) -> str:
    """Run the file with `cpu_s` CPU seconds, a number as text. Return JSON of `{"status": N}`: the exit status, or
    minus the signal that ended it."""
    with stdin_file(stdin.encode()) as source:
        child = os.fork()
        if child == 0:
            _be_program(os.path.join(private_dir(), path), source, float(cpu_s))
        try:
            _, status = os.waitpid(child, 0)
        finally:
            _end_all(child)
    return json.dumps({"status": os.waitstatus_to_exitcode(status)})


def _end_all(child: int) -> None:
    """Kill and reap the remaining processes of the program: every process but this one if the session has a separate
    pid namespace or kill is confined, otherwise its process group."""
    reaches_all = os.getpid() == 1 or kill_is_confined()
    for kill, target in ((os.kill, child), (os.kill, -1) if reaches_all else (os.killpg, child)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(target, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1 if reaches_all else -child, 0)


def _be_program(path: str, source: int, cpu_s: float) -> NoReturn:
    try:
        os.setsid()
        _arrange(source, cpu_s)
        _execute(path)
    finally:
        os._exit(1)


def _arrange(source: int, cpu_s: float) -> None:
    """Set the program's standard streams, default signals and CPU limit."""
    for number in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = math.ceil(cpu_s)
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard < 0 else min(wanted, hard), hard))
    os.dup2(source, 0)
    os.closerange(3, _DESCRIPTORS_MAX)
    _set_stream("stdin", 0, "r")
    _set_stream("stdout", 1, "w")
    _set_stream("stderr", 2, "w", buffering=1, errors="backslashreplace")


def _set_stream(name: str, descriptor: int, mode: str, *, buffering: int = -1, errors: str = "strict") -> None:
    """Set a stream under both names: the interpreter flushes both, and the second keeps the buffer open when a program
    wraps it again."""
    stream = os.fdopen(descriptor, mode, buffering, "utf-8", errors, "\n", closefd=False)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _execute(path: str) -> NoReturn:
    """Run the file as the main program and end this process as the interpreter does."""
    sys.argv = [path]
    sys.path.insert(0, private_dir())
    sys.dont_write_bytecode = True
    atexit.register(_keep_modules, dict(sys.modules))  # registered before those of the program, so called after them
    sys.modules["__main__"] = ModuleType("__main__")
    vars(sys.modules["__main__"])["__builtins__"] = builtins
    name = os.fsencode(path)
    file = _fopen(name, b"r")
    failed = not file or ctypes.pythonapi.PyRun_SimpleFileExFlags(ctypes.c_void_p(file), name, 1, None)
    ctypes.pythonapi.Py_Exit(1 if failed else 0)
    raise AssertionError("Py_Exit returned")


def _keep_modules(warm: dict[str, ModuleType]) -> None:
    """Hide the modules of the zygote from finalization. The program has no object in them, and destroying them would
    copy their pages."""
    for name, module in warm.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


_fopen = ctypes.CDLL(None).fopen
_fopen.restype = ctypes.c_void_p
_fopen.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
