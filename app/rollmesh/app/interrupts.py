"""Ctrl-C, SIGTERM and SIGHUP: the first one requests an orderly stop, the second one kills all child processes and
exits at once.

SIGHUP arrives when the terminal or its SSH session is closed. Under `nohup` it is ignored.

with Interrupts(leave=view.close) as interrupts:
    await interrupts.unless_stopped(slow())      # raises Stopped as soon as a stop is requested
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from rollmesh.shared.process.stop_signals import stop_signals

T = TypeVar("T")

EXIT_INTERRUPTED = 130
CHILDREN_S_MAX = 2.0
_POLL_S = 0.01


class Stopped(Exception):
    """A signal requested a stop."""


class Interrupts:
    """Handle SIGINT, SIGTERM and SIGHUP of this process while entered, in a running event loop of the main thread.

    Outside the main thread it handles no signal.
    """

    def __init__(self, *, leave: Callable[[], None] = lambda: None, notice: Callable[[], None] = lambda: None) -> None:
        """`leave` restores the terminal before an immediate exit; `notice` is called at the first signal."""
        self.stop = asyncio.Event()
        self._leave = leave
        self._notice = notice
        self._before: dict[int, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        in_main = threading.current_thread() is threading.main_thread()
        for number in stop_signals() if in_main else ():
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    async def unless_stopped(self, work: Awaitable[T]) -> T:
        """Return the result of `work`. If a stop is requested first, cancel `work`, wait for it and raise Stopped."""
        task = asyncio.ensure_future(work)
        stopping = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Stopped
            return task.result()
        finally:
            for one in (task, stopping):
                one.cancel()
            await asyncio.wait([task, stopping])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Not `loop.add_signal_handler`: a second Ctrl-C must work even where the loop is stuck.
        if self.stop.is_set():
            self._leave()
            _end_children(CHILDREN_S_MAX)
            os._exit(EXIT_INTERRUPTED)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if not self.stop.is_set():
            self.stop.set()
            self._notice()


def _end_children(limit_s: float) -> None:
    """Kill the processes that this thread has started, and wait until they have exited, so that the prompt returns
    after them.

    The kernel kills their own children with them.
    """
    try:
        running = {
            int(pid) for pid in Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        }
    except OSError:  # this kernel does not list them; it kills them when this process exits
        return
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + limit_s
    while running and time.monotonic() < deadline_s:
        running -= {pid for pid in running if _is_gone(pid)}
        time.sleep(_POLL_S)


def _is_gone(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True
