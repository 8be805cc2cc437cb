"""What happened to a run's processes: events for the live display, for `status`, and in RUN/processes.jsonl.

A line per event. The file is bounded: the supervisor drops its older half when it starts with one that is too large.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from rollmesh.shared.clock import Clock

FILE = "processes.jsonl"
_FILE_BYTES_MAX = 1 << 20
_RECENT = 200
STOPPED = 128 + signal.SIGTERM
"""Exit code of a process after a stop that was asked for. Not 0: what somebody else has stopped is no part that is done."""
BAD_CONFIG, DISK_FULL = 2, 3
"""Exit codes of a process whose config cannot work, or whose disk is full: starting it again would not help."""
_WORDS = {0: "ended in good order", STOPPED: "was told to stop"}


class ProcessEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened to one process."""

    time_s: float
    """Wall clock, seconds since the Unix epoch."""
    process: str
    """Its name: that of its part, e.g. `rollout-0`."""
    what: Literal["started", "ended", "restarting", "gave_up"]
    pid: int = 0
    """Process id; absent where there is no process."""
    code: int | None = None
    """`ended`: exit code, or minus the signal. 0 is in good order."""
    cause: str = ""
    """`ended`, `restarting`, `gave_up`: how it ended, in words."""
    pause_s: float = 0.0
    """`restarting`: pause before the next start, seconds."""
    restarts: int = 0
    """`restarting`: restarts within the window, this one included."""

    def text(self) -> str:
        """In a line, for people."""
        match self.what:
            case "started":
                return f"{self.process} started, pid {self.pid}"
            case "ended":
                return f"{self.process} {self.cause}"
            case "restarting":
                return f"{self.process} {self.cause}; starts again in {self.pause_s:g} s (restart {self.restarts})"
            case "gave_up":
                return f"{self.process} {self.cause}; not started again"


def how_ended(code: int) -> str:
    """An exit code as `subprocess` tells it, in words."""
    if code in _WORDS:
        return _WORDS[code]
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


class ProcessLog:
    """Keeps the events of a run: the latest in memory, all in a file. `on_event` is told of each."""

    def __init__(self, path: Path, *, clock: Clock, on_event: Callable[[ProcessEvent], None] = lambda _: None) -> None:
        self.recent: deque[ProcessEvent] = deque(maxlen=_RECENT)
        self._path = path
        self._clock = clock
        self._on_event = on_event
        _tidy(path)

    def now_s(self) -> float:
        return self._clock.wall_s()

    def add(self, event: ProcessEvent) -> None:
        self.recent.append(event)
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
        self._on_event(event)


def read_process_events(path: Path) -> list[ProcessEvent]:
    """Events in the order in which they happened; a last line that a crash cut short is left out. Empty without a file."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=ProcessEvent) for line in lines]


def _tidy(path: Path) -> None:
    """Drops a line that a crash cut short, and the older half of a large file."""
    if not path.exists():
        return
    data = path.read_bytes()
    kept = data[: data.rfind(b"\n") + 1]
    if len(kept) > _FILE_BYTES_MAX:
        kept = kept[-_FILE_BYTES_MAX // 2 :].partition(b"\n")[2]
    if kept != data:
        path.write_bytes(kept)
