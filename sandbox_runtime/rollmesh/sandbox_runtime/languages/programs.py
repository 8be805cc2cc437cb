"""Languages whose programs are source files that commands of the host build and run: C, C++, languages of the operator,
and JavaScript.

A build runs inside the jail under the same limits. If it fails, the outcome is ERROR with the text of the compiler. The
program starts in the directory of the session. Only the files that it writes there remain.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.sandbox_runtime.languages import children, port
from rollmesh.sandbox_runtime.languages.build_folder import build_folder
from rollmesh.sandbox_runtime.languages.port import Reply
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.output import Capture, Emit
from rollmesh.sandbox_runtime.process_env import private_dir
from rollmesh.sandbox_runtime.program import Program

_NODE_ADDRESS_SPACE_BYTES = 1 << 30
"""Bytes of address space that node's compilers reserve before the first line runs; with less, node interprets, about
ten times slower."""
_OUT_OF_MEMORY = ("std::bad_alloc", "JavaScript heap out of memory", "out of memory allocating")
_MESSAGE_CHARS_MAX = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a source file is built and run. In an argument, `{folder}` stands for the directory that contains the
    source."""

    source: str
    """Name of the source file."""
    run: Sequence[str]
    """Command that runs the program, in the directory of the session."""
    build: Sequence[str] = ()
    """Command that builds the program, in the directory of the source. Empty if there is nothing to build."""
    full_address_space: bool = False
    """Whether the program gets all the address space of the profile, which some runtimes reserve at their start."""

    @property
    def needs(self) -> str:
        """The program of the host without which the language is missing."""
        return (self.build or self.run)[0]


COMMANDS = {
    "c": Command(
        source="main.c", build=("gcc", "-O2", "-std=gnu17", "-o", "program", "main.c", "-lm"), run=("{folder}/program",)
    ),
    "cpp": Command(
        source="main.cpp", build=("g++", "-O2", "-std=gnu++17", "-o", "program", "main.cpp"), run=("{folder}/program",)
    ),
}
"""By language. A zygote adds the languages of the operator before it is contained, so that its sessions inherit
them."""


class CommandLanguage:
    """Runs programs by a command."""

    def __init__(self, command: Command, limits: Limits, emit: Emit | None) -> None:
        self._command = command
        self._limits = limits
        self._emit = emit

    def run(self, program: Program, wall_s: float) -> Reply:
        began_s, command, built_s = time.monotonic(), self._command, 0.0
        with build_folder(command.source, program.code) as folder:
            reply: Reply = {"outcome": port.OK}
            if command.build:
                reply = self._build(folder, wall_s)
                built_s = reply["cpu_s"]
            if reply["outcome"] == port.OK:
                argv = [argument.replace("{folder}", folder) for argument in command.run]
                left_s = began_s + wall_s - time.monotonic()
                reply = _run(argv, program, self._limits, self._emit, left_s, address_space=command.full_address_space)
                reply["cpu_s"] += built_s
        return reply | {"wall_s": time.monotonic() - began_s}

    def _build(self, folder: str, wall_s: float) -> Reply:
        streams = _streams(self._limits, None)
        argv = [argument.replace("{folder}", folder) for argument in self._command.build]
        ended = children.run_child(
            argv, streams, cwd=folder, wall_s=wall_s, prepare=children.cpu_bound(self._limits.cpu_s)
        )
        reply = _reply(ended, streams)
        if reply["outcome"] == port.ERROR:
            first = next(
                (line for line in reply["stderr"].splitlines() if "error" in line), "the compiler created no program"
            )
            reply |= port.failed("CompileError", first[:_MESSAGE_CHARS_MAX])
        return reply


class JavaScript:
    """JavaScript on node, one process per program."""

    def __init__(self, limits: Limits, emit: Emit | None) -> None:
        self._limits = limits
        self._emit = emit

    def run(self, program: Program, wall_s: float) -> Reply:
        began_s = time.monotonic()
        with build_folder("main.js", program.code) as folder:
            argv = ["node", *_node_flags(self._limits), os.path.join(folder, "main.js")]
            reply = _run(argv, program, self._limits, self._emit, wall_s, address_space=True)
        return reply | {"wall_s": time.monotonic() - began_s}


def _node_flags(limits: Limits) -> list[str]:
    """Return flags that keep the heap below the session's memory. A small address space has no room for compiled
    code."""
    flags = [f"--max-old-space-size={max(16, limits.memory_bytes * 3 // 4 >> 20)}", "--v8-pool-size=1"]
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    return [*flags, "--jitless"] if 0 <= most < _NODE_ADDRESS_SPACE_BYTES else flags


def _run(
    argv: Sequence[str],
    program: Program,
    limits: Limits,
    emit: Emit | None,
    wall_s: float,
    *,
    address_space: bool = False,
) -> Reply:
    streams = _streams(limits, emit)
    ended = children.run_child(
        [*argv, *program.arguments],
        streams,
        cwd=private_dir(),
        wall_s=wall_s,
        stdin=program.stdin,
        prepare=children.cpu_bound(limits.cpu_s, address_space),
    )
    return _reply(ended, streams)


def _streams(limits: Limits, emit: Emit | None) -> children.Streams:
    keep, flood = limits.output_bytes, limits.flood_bytes
    return children.Streams(
        stdout=Capture(1, keep=keep, flood=flood, emit=emit), stderr=Capture(2, keep=keep, flood=flood, emit=emit)
    )


def _reply(ended: children.ChildExit, streams: children.Streams) -> Reply:
    stdout, cut_stdout = streams.stdout.take()
    stderr, cut_stderr = streams.stderr.take()
    reply: Reply = {"stdout": stdout, "stderr": stderr, "truncated": cut_stdout or cut_stderr}
    reply |= {"exit_status": ended.status, "cpu_s": ended.cpu_s}
    return reply | _outcome(ended, stderr)


def _outcome(ended: children.ChildExit, stderr: str) -> Reply:
    """Map an exit to an outcome: a limit of the sandbox, a limit of the kernel, or the program's own end."""
    if ended.stopped == port.TIME:
        return port.failed("TimeLimitError", "wall time limit reached", port.TIME)
    if ended.stopped == port.OUTPUT:
        return port.failed("OutputLimitError", "printed more than the limit", port.OUTPUT)
    if ended.status == -signal.SIGXCPU:
        return port.failed("TimeLimitError", "CPU time limit reached", port.TIME)
    if ended.status and any(mark in stderr for mark in _OUT_OF_MEMORY):
        return port.failed("MemoryError", "memory limit reached", port.MEMORY)
    if ended.status < 0:
        return port.failed("Signal", f"ended by {_signal_name(-ended.status)}")
    return port.failed("ExitStatus", str(ended.status)) if ended.status else {"outcome": port.OK}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
