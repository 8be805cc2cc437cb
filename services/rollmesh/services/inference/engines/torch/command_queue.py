"""Commands from the event loop to the compute thread, which sleeps until it has to see them.

A command that wakes a sleeping thread costs two switches of the interpreter lock. While a step is held, the thread
therefore sleeps through the commands that only add to the step, until enough of them wait.

The signal is a lock and not a `queue.SimpleQueue`: in CPython 3.11, its `get(timeout)` never returns if the thread is
not scheduled for as long as the timeout between two of its steps, as on a loaded machine.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextlib import suppress
from typing import Generic, TypeVar

_T = TypeVar("_T")


class CommandQueue(Generic[_T]):
    """First in, first out. One thread takes; any thread puts."""

    def __init__(self) -> None:
        self._commands: deque[_T] = deque()
        self._no_signal = threading.Lock()
        """Held while nothing was announced. `put` releases it."""
        self._no_signal.acquire()
        self._wake_at = sys.maxsize
        """Number of waiting commands that wakes the thread."""

    def __len__(self) -> int:
        return len(self._commands)

    def put(self, command: _T, *, urgent: bool = True) -> None:
        """Add a command. It wakes the thread if it is urgent or if as many wait as `wait` named."""
        self._commands.append(command)
        if urgent or len(self._commands) >= self._wake_at:
            with suppress(RuntimeError):  # another command has announced itself already
                self._no_signal.release()

    def take(self) -> _T:
        """Return the oldest command. Raises IndexError without one."""
        return self._commands.popleft()

    def wait(self, num: int, timeout_s: float | None) -> None:
        """Sleep until `num` commands wait, an urgent one is put, or `timeout_s` seconds have passed. May return
        early."""
        self._wake_at = num
        try:
            if len(self._commands) < num:
                self._no_signal.acquire(timeout=-1 if timeout_s is None else timeout_s)
        finally:
            self._wake_at = sys.maxsize
        self._no_signal.acquire(blocking=False)  # what it announced waits in the queue
