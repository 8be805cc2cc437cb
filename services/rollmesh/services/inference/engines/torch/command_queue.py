"""Commands from the event loop to the compute thread, which sleeps until it has to see them.

A command that wakes a sleeping thread costs two switches of the interpreter lock. While a step is held, the thread
therefore sleeps through the commands that only add to the step, until enough of them wait.
"""

from __future__ import annotations

import queue
import sys
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class CommandQueue(Generic[_T]):
    """First in, first out. One thread takes; any thread puts."""

    def __init__(self) -> None:
        self._commands: deque[_T] = deque()
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wake_at = sys.maxsize
        """Number of waiting commands that wakes the thread."""

    def __len__(self) -> int:
        return len(self._commands)

    def put(self, command: _T, *, urgent: bool = True) -> None:
        """Add a command. It wakes the thread if it is urgent or if as many wait as `wait` named."""
        self._commands.append(command)
        if urgent or len(self._commands) >= self._wake_at:
            self._signals.put(None)

    def take(self) -> _T:
        """Return the oldest command. Raises IndexError without one."""
        return self._commands.popleft()

    def wait(self, num: int, timeout_s: float | None) -> None:
        """Sleep until `num` commands wait, an urgent one is put, or `timeout_s` seconds have passed. May return
        early."""
        self._wake_at = num
        try:
            if len(self._commands) < num:
                self._signals.get(timeout=timeout_s)
        except queue.Empty:
            pass
        finally:
            self._wake_at = sys.maxsize
        while not self._signals.empty():  # what they announced waits in the queue
            self._signals.get()
