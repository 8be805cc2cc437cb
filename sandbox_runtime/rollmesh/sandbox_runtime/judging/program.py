"""Runs the candidate's Python file as a program: a fork of the warm session with the test's standard input.

The interpreter itself executes the file as its main program and then finalizes as at the end of `python FILE`: it joins threads,
calls the functions of `atexit`, flushes the streams and destroys the objects that are left.

What the program prints is the session's own output, bounded and cut there. Its end is reported as a status; nothing it does to this
process can make more of that than a status. Nothing of it outlives the call.
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
    """Run it with `cpu_s` CPU seconds, a number as text. JSON of `{"status": N}`: the exit status, or minus the signal that ended it."""
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
    """Kill and reap whatever the program left: in a session of its own every process but this one, elsewhere its process group."""
    everybody = os.getpid() == 1 or kill_is_confined()
    for kill, whom in ((os.kill, child), (os.kill, -1) if everybody else (os.killpg, child)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(whom, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1 if everybody else -child, 0)


def _be_program(path: str, source: int, cpu_s: float) -> NoReturn:
    try:
        os.setsid()
        _arrange(source, cpu_s)
        _execute(path)
    finally:
        os._exit(1)


def _arrange(source: int, cpu_s: float) -> None:
    """Give the program its own standard streams, the usual signals, and its share of CPU."""
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
    """Under both names: the interpreter flushes both, and the second keeps the buffer open when a program wraps it again."""
    stream = os.fdopen(descriptor, mode, buffering, "utf-8", errors, "\n", closefd=False)
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def _execute(path: str) -> NoReturn:
    """Run the file as the main program and end this process as the interpreter would."""
    sys.argv = [path]
    sys.path.insert(0, private_dir())
    sys.dont_write_bytecode = True
    atexit.register(
        _keep_modules, dict(sys.modules)
    )  # before the program registers any, so it is called after all of them
    sys.modules["__main__"] = ModuleType("__main__")
    vars(sys.modules["__main__"])["__builtins__"] = builtins
    name = os.fsencode(path)
    file = _fopen(name, b"r")
    failed = not file or ctypes.pythonapi.PyRun_SimpleFileExFlags(ctypes.c_void_p(file), name, 1, None)
    ctypes.pythonapi.Py_Exit(1 if failed else 0)
    raise AssertionError("Py_Exit returned")


def _keep_modules(warm: dict[str, ModuleType]) -> None:
    """Hide the modules of the zygote from finalization. The program has no object in them, and destroying them would copy their pages."""
    for name, module in warm.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


_fopen = ctypes.CDLL(None).fopen
_fopen.restype = ctypes.c_void_p
_fopen.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
