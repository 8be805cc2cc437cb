"""Processes of tests that are forked from one process which has imported torch and transformers, whose import takes 4 s
of processor time.

    with ForkServer() as server:
        process = server.start("tests.unit.trainer.rank_worker", "FOLDER", "0", "2")
        process.wait(60.0)

A forked process runs a module as `python -m` does, in a separate session, and is killed when the server exits. The
server exits when its standard input is closed. A test whose claim is how a process of the product starts must not use
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from ctypes import CDLL
from pathlib import Path
from typing import NoReturn, Self

from rollmesh.shared.process.process_launch import bound_to_parent

ROOT = Path(__file__).parents[1]
PRELOADED = ("rollmesh.services.learner.engines.torch_trainer", "transformers.models.qwen3.modeling_qwen3")
_START_S = 120.0
_SET_DEATH_SIGNAL = 1


class ForkedProcess:
    """A child of the server, with the methods of `subprocess.Popen` that tests and `RankGroup` use."""

    def __init__(self, server: ForkServer, args: list[str], pid: int) -> None:
        self._server = server
        self.args, self.pid = args, pid

    @property
    def returncode(self) -> int | None:
        return self._server.codes.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or minus the signal. Raise TimeoutExpired."""
        deadline_s = time.monotonic() + (_START_S if timeout is None else timeout)
        while (code := self.returncode) is None:
            if not self._server.read(max(0.0, deadline_s - time.monotonic())):
                raise subprocess.TimeoutExpired(self.args, timeout or _START_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it is running."""
        while self.returncode is None and self._server.read(0.0):
            pass
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # the server has read its exit code since
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL if the process is running."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process with the libraries."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        """Exit codes by process id."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            bound_to_parent([sys.executable, "-m", "tests.forked"]),
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=_START_S)  # closes its standard input

    def start(
        self, module: str, *arguments: object, out: Path, err: Path, env: Mapping[str, str] | None = None
    ) -> ForkedProcess:
        """Run a module, which appends its output to the files `out` and `err`, with more variables of the
        environment."""
        args = [module, *map(str, arguments)]
        assert self._process.stdin is not None
        request = {"args": args, "files": [str(out), str(err)], "env": dict(env or {})}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._started: int | None = None
        while self._started is None:
            assert self.read(_START_S), "the server did not fork"
        return ForkedProcess(self, args, self._started)

    def read(self, timeout_s: float) -> bool:
        """Read one message of the server. Return whether there was one."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return False
        line = self._process.stdout.readline()
        assert line, "the server of forked processes has exited"
        pid, code = json.loads(line)
        if code is None:
            self._started = pid
        else:
            self.codes[pid] = code
        return True


def run_all(
    server: ForkServer, module: str, folder: Path, arguments: list[list[str]]
) -> list[subprocess.CompletedProcess[str]]:
    """Run a module with each list of arguments at the same time, and return how the processes ended."""
    files = [(folder / f"forked-{n}.out", folder / f"forked-{n}.err") for n in range(len(arguments))]
    running = [server.start(module, *one, out=out, err=err) for one, (out, err) in zip(arguments, files, strict=True)]
    codes = [process.wait(280.0) for process in running]
    return [
        subprocess.CompletedProcess(process.args, code, out.read_text(), err.read_text())
        for process, code, (out, err) in zip(running, codes, files, strict=True)
    ]


def _run_child(args: list[str], files: list[str], env: dict[str, str]) -> NoReturn:
    os.setsid()
    CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    for number, name in enumerate((os.devnull, *files)):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.environ.update(env)
    sys.argv = args
    code = 1
    try:
        runpy.run_module(args[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    finally:
        if sys.exc_info()[0] is not None:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # ending the interpreter with all libraries would cost a second


def main() -> None:
    """Fork for each line of the standard input until it ends, and write `[pid, null]`, later `[pid, code]`."""
    for module in PRELOADED:
        __import__(module)
    commands, replies = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    running: dict[int, int] = {}
    buffer = b""
    while True:
        ready = select.select([commands, *running], [], [])[0]
        for descriptor in ready:
            if descriptor in running:
                pid = running.pop(descriptor)
                os.close(descriptor)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(replies, json.dumps([pid, code]).encode() + b"\n")
        if commands not in ready:
            continue
        data = os.read(commands, 1 << 16)
        if not data:
            return
        buffer += data
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            if not (pid := os.fork()):
                for descriptor in (commands, replies, *running):
                    os.close(descriptor)
                _run_child(**json.loads(line))
            running[os.pidfd_open(pid)] = pid
            os.write(replies, json.dumps([pid, None]).encode() + b"\n")


if __name__ == "__main__":
    main()
