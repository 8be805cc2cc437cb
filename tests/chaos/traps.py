"""Traps: a process that passes an armed fault point is killed or stopped there, by a real signal, so that no clean-up
runs.

The test arms a trap with a file in a folder that an environment variable names. The first process that passes the fault
point removes the file and receives the signal. Without a trap, the only effect is the check for a file.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

FOLDER_VARIABLE = "ROLLMESH_CHAOS_TRAPS"
_passed: Counter[str] = Counter()


class Traps:
    """The traps that a test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def arm(self, moment: str, *, signal_number: int = signal.SIGKILL, after: int = 0) -> None:
        """Send the signal to the process that passes `moment`, after it passed it `after` times since it first saw the
        trap."""
        temporary = self.folder / f".{moment}"
        temporary.write_text(f"{int(signal_number)} {after}")
        temporary.rename(self.folder / f"{moment}.armed")

    def victim(self, moment: str) -> int | None:
        """Return the process id that the trap has hit; None while it is armed."""
        for path in self.folder.glob(f"{moment}.sprung.*"):
            return int(path.suffix[1:])
        return None

    def disarm(self, moment: str) -> None:
        """Remove the trap at `moment`."""
        (self.folder / f"{moment}.armed").unlink(missing_ok=True)

    def clear(self, moment: str) -> None:
        """Delete the record of a hit, so that the trap can be armed again."""
        for path in self.folder.glob(f"{moment}.sprung.*"):
            path.unlink()


def passes(moment: str) -> None:
    """A process calls this at each of its fault points."""
    if not (folder_name := os.environ.get(FOLDER_VARIABLE)):
        return  # a mesh without traps
    folder = Path(folder_name)
    armed = folder / f"{moment}.armed"
    try:
        signal_number, after = map(int, armed.read_text().split())
        _passed[moment] += 1
        if _passed[moment] <= after:
            return
        armed.rename(folder / f"{moment}.sprung.{os.getpid()}")
    except FileNotFoundError:  # not armed, or another process was quicker
        return
    _passed[moment] = 0
    os.kill(os.getpid(), signal_number)
