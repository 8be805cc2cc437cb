"""Events of a run's processes, for the live display, for `status`, and in RUN/processes.jsonl.

The file has a line per event. It is bounded, because the supervisor drops the older half of a large file when it
starts.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from rollmesh.shared.clock import Clock
from rollmesh.shared.store.private_files import private_opener

FILE = "processes.jsonl"
_FILE_BYTES_MAX = 1 << 20
_RECENT = 200
STOPPED = 128 + signal.SIGTERM
"""Exit code of a process after a requested stop. It is not 0, because a process that was stopped externally has not
finished."""
BAD_CONFIG, DISK_FULL = 2, 3
"""Exit codes for an unusable configuration and for a full disk. A restart would not help."""
_WORDS = {0: "exited cleanly", STOPPED: "was stopped"}


class ProcessEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of one process."""

    time_s: float
    """Wall clock, seconds since the Unix epoch."""
    process: str
    """Name of the process, e.g. `rollout-0`."""
    what: Literal["started", "ended", "restarting", "gave_up"]
    pid: int = 0
    """Process id; absent if there is no process."""
    code: int | None = None
    """`ended`: exit code, or minus the signal. 0 is a clean exit."""
    cause: str = ""
    """`ended`, `restarting`, `gave_up`: cause of the exit, in words."""
    pause_s: float = 0.0
    """`restarting`: pause before the next start, seconds."""
    restarts: int = 0
    """`restarting`: restarts within the window, this one included."""

    def text(self) -> str:
        """Return a line for display."""
        match self.what:
            case "started":
                return f"{self.process} started, pid {self.pid}"
            case "ended":
                return f"{self.process} {self.cause}"
            case "restarting":
                return f"{self.process} {self.cause}; restarts in {self.pause_s:g} s (restart {self.restarts})"
            case "gave_up":
                return f"{self.process} {self.cause}; it is not restarted"


def how_ended(code: int) -> str:
    """Describe an exit code of `subprocess`."""
    if code in _WORDS:
        return _WORDS[code]
    if code > 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


class ProcessLog:
    """Stores the events of a run: the latest in memory, all in a file. It calls `on_event` for each event."""

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
        with open(self._path, "ab", opener=private_opener) as file:
            file.write(msgspec.json.encode(event) + b"\n")
        self._on_event(event)


def read_process_events(path: Path) -> list[ProcessEvent]:
    """Return the events in order. A last line that a crash truncated is omitted. Empty without a file."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=ProcessEvent) for line in lines]


def _tidy(path: Path) -> None:
    """Drop a line that a crash truncated, and the older half of a large file."""
    if not path.exists():
        return
    data = path.read_bytes()
    kept = data[: data.rfind(b"\n") + 1]
    if len(kept) > _FILE_BYTES_MAX:
        kept = kept[-_FILE_BYTES_MAX // 2 :].partition(b"\n")[2]
    if kept != data:
        path.write_bytes(kept)
