"""The baselines of `bench sandbox`: a bare fork of a warm interpreter, and a fresh interpreter as it is, in bubblewrap,
in firejail.

Programs are started by posix_spawn and awaited by pidfd, the cheapest method: the CPU of the bench itself is in all
results. bubblewrap exits without waiting for its pid 1, so most of its CPU would not be counted. Therefore this process
adopts orphans during a measurement (`adopting`), and an execution ends, as that of a session, when all its processes
have exited. What each isolates: `bare fork` and `bare python` nothing; bubblewrap all namespaces and a read-only root,
no seccomp filter, no limits; firejail mount, pid, ipc, uts and network namespaces, a read-only root, no capabilities,
its seccomp filter, no limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.sandbox import warm_fork
from benchmarks.sandbox.arm import CODE, PRINTED
from rollmesh.sandbox_runtime import launcher, syscalls

_PR_SET_CHILD_SUBREAPER = 36
PYTHON = os.path.realpath(sys.executable)
BARE = (PYTHON, "-I", "-S", "-c", CODE)
BWRAP = ("bwrap", "--unshare-all", "--ro-bind", "/", "/", "--tmpfs", "/tmp", "--die-with-parent", *BARE)
FIREJAIL = (
    "firejail", "--quiet", "--noprofile", "--read-only=/", "--private-tmp", "--private-dev", "--net=none",
    "--nonewprivs", "--caps.drop=all", "--seccomp", "--", *BARE,
)  # fmt: skip


class WarmFork:
    """A bare fork from a warm interpreter with the modules of our profile: the lower bound."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = preload

    async def start(self) -> None:
        """Start it and wait until it is warm."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = _execute_fork_server(theirs, self._preload)
        theirs.close()
        await asyncio.to_thread(self._control.recv, 16)

    async def close(self) -> None:
        """End it."""
        self._control.close()
        await asyncio.to_thread(self._process.wait)

    async def prepare(self, num: int) -> None:
        """Do nothing: it is warm."""

    async def once(self, worker: int) -> float:
        begin_s = time.perf_counter()
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(self._control, [b"fork"], [theirs.fileno()])
            ours.setblocking(False)
            await loop.sock_sendall(ours, CODE.encode())
            printed = await loop.sock_recv(ours, 100)
            latency_s = time.perf_counter() - begin_s
            while await loop.sock_recv(ours, 100):
                pass  # until the child has exited
        _require(printed, "the warm fork")
        return latency_s

    async def settle(self) -> None:
        """Do nothing: each child was waited for."""


class RivalProgram:
    """A program that is started for each execution and prints."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = (shutil.which(command[0]) or command[0], *command[1:])
        self._running: set[int] = set()
        self._others: set[int] = set()

    async def prepare(self, num: int) -> None:
        self._others = _children()

    async def once(self, worker: int) -> float:
        begin_s = time.perf_counter()
        pid, reading = _spawn(self._command)
        self._running.add(pid)
        await _ended(pid)
        latency_s = time.perf_counter() - begin_s
        self._running.discard(pid)
        for orphan in _children() - self._others - self._running:
            self._running.add(orphan)  # one of the workers waits for it
            with contextlib.suppress(ProcessLookupError):
                await _ended(orphan)
            self._running.discard(orphan)
        printed = os.read(reading, 100)
        os.close(reading)
        _require(printed, self._command[0])
        return latency_s

    async def settle(self) -> None:
        """Do nothing: each program was waited for."""


def _execute_fork_server(control: socket.socket, preload: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [PYTHON, "-I", "-S", warm_fork.__file__, str(control.fileno()), *preload]
    return subprocess.Popen(command, pass_fds=[control.fileno()], env=launcher.ENVIRONMENT)


def _spawn(command: tuple[str, ...]) -> tuple[int, int]:
    """Return the pid, and a pipe from its output."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    actions = [(os.POSIX_SPAWN_DUP2, writing, 1)]
    try:
        return os.posix_spawn(command[0], command, launcher.ENVIRONMENT, file_actions=actions), reading
    finally:
        os.close(writing)


async def _ended(pid: int) -> None:
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(pid)
    gone: asyncio.Future[None] = loop.create_future()
    loop.add_reader(pidfd, lambda: None if gone.done() else gone.set_result(None))
    try:
        await gone
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        _wait_for_all()


def _children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def _wait_for_all() -> None:
    """Wait for every exited child, including adopted ones. A pidfd reports the exit even after the child was waited
    for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Adopt orphaned descendants, so that their CPU is counted."""
    syscalls.prctl(_PR_SET_CHILD_SUBREAPER, 1, "adopt orphans")
    try:
        yield
    finally:
        syscalls.prctl(_PR_SET_CHILD_SUBREAPER, 0, "adopt no orphans")


def _require(printed: bytes, who: str) -> None:
    if printed.decode().strip() != PRINTED:
        raise RuntimeError(f"{who} printed {printed!r} instead of {PRINTED}: is the interpreter visible to it?")


def present(command: Sequence[str]) -> str:
    """Run the program once. Return an empty string if it works on this host, else the reason."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    tried = subprocess.run(command, capture_output=True, env=launcher.ENVIRONMENT, timeout=30.0, check=False)
    return (
        "" if tried.stdout.decode().strip() == PRINTED else f"{command[0]} does not work here: {tried.stderr[-200:]!r}"
    )
