"""What `bench sandbox` compares with: a bare fork of a warm interpreter, and a fresh interpreter as it is, in bubblewrap, in firejail.

Programs are started by posix_spawn and awaited by pidfd, the cheapest way there is: the bench's own share is in everybody's CPU.
bubblewrap ends without waiting for its pid 1, and so would leave most of its CPU in nobody's books: while programs are measured this process
adopts orphans (`adopting`), and an execution is over, as that of a session, when nothing of it is left.
What each isolates: `bare fork` and `bare python` nothing; bubblewrap all namespaces and a read-only root, no seccomp filter, no limits; firejail
mount, pid, ipc, uts and network namespaces, a read-only root, no capabilities, its seccomp filter, no limits.
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

from rollmesh.bench import warm_fork
from rollmesh.bench.sandbox_arm import CODE, PRINTED
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
    """A bare fork from a warm interpreter with the modules of our profile: the limit of what can be reached."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = preload

    async def start(self) -> None:
        """Execute it and wait until it is warm."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = _execute_fork_server(theirs, self._preload)
        theirs.close()
        await asyncio.to_thread(self._control.recv, 16)

    async def close(self) -> None:
        """End it."""
        self._control.close()
        await asyncio.to_thread(self._process.wait)

    async def prepare(self, num: int) -> None:
        """Nothing: it is warm."""

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
                pass  # until the child is gone
        _require(printed, "the warm fork")
        return latency_s

    async def settle(self) -> None:
        """Children are waited for at once."""


class Program:
    """A program started for each execution, that prints."""

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
            self._running.add(orphan)  # for one worker to wait for, whosever it is
            with contextlib.suppress(ProcessLookupError):
                await _ended(orphan)
            self._running.discard(orphan)
        printed = os.read(reading, 100)
        os.close(reading)
        _require(printed, self._command[0])
        return latency_s

    async def settle(self) -> None:
        """Each is waited for at once."""


def _execute_fork_server(control: socket.socket, preload: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [PYTHON, "-I", "-S", warm_fork.__file__, str(control.fileno()), *preload]
    return subprocess.Popen(command, pass_fds=[control.fileno()], env=launcher.ENVIRONMENT)


def _spawn(command: tuple[str, ...]) -> tuple[int, int]:
    """Its pid, and a pipe from its output."""
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
    """Every child that has ended, adopted ones too; the pidfd of one tells of its end also when it has been waited for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Orphans below this process become its children, so that their CPU is counted."""
    syscalls.prctl(_PR_SET_CHILD_SUBREAPER, 1, "adopt orphans")
    try:
        yield
    finally:
        syscalls.prctl(_PR_SET_CHILD_SUBREAPER, 0, "adopt no orphans")


def _require(printed: bytes, who: str) -> None:
    if printed.decode().strip() != PRINTED:
        raise RuntimeError(f"{who} printed {printed!r} instead of {PRINTED}: is the interpreter visible to it?")


def present(command: Sequence[str]) -> str:
    """Empty if a program can be compared with here, else why not: it is asked to run once."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    tried = subprocess.run(command, capture_output=True, env=launcher.ENVIRONMENT, timeout=30.0, check=False)
    return (
        "" if tried.stdout.decode().strip() == PRINTED else f"{command[0]} does not work here: {tried.stderr[-200:]!r}"
    )
