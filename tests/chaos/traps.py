"""Traps: a process that passes an armed moment ends, or stops, exactly there. By real signals, so nothing gets to clean up.

The test arms a trap by a file in the folder that the process is told of (environment variable); whoever passes the moment first takes
the file away and is hit. No trap, no effect but the look for a file.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

FOLDER_VARIABLE = "ROLLMESH_CHAOS_TRAPS"
_passed: Counter[str] = Counter()


class Traps:
    """The test's side."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def arm(self, moment: str, *, signal_number: int = signal.SIGKILL, after: int = 0) -> None:
        """Hits whoever passes `moment`, having passed it `after` times since it first saw the trap."""
        temporary = self.folder / f".{moment}"
        temporary.write_text(f"{int(signal_number)} {after}")
        temporary.rename(self.folder / f"{moment}.armed")

    def victim(self, moment: str) -> int | None:
        """Process id of whom the trap has hit; None as long as it is armed."""
        for path in self.folder.glob(f"{moment}.sprung.*"):
            return int(path.suffix[1:])
        return None

    def disarm(self, moment: str) -> None:
        """Nobody is hit any more who passes `moment`."""
        (self.folder / f"{moment}.armed").unlink(missing_ok=True)

    def clear(self, moment: str) -> None:
        """Forgets that the trap has hit somebody, so that it can be armed again."""
        for path in self.folder.glob(f"{moment}.sprung.*"):
            path.unlink()


def passes(moment: str) -> None:
    """Called by a process at each of its moments."""
    if not (folder_name := os.environ.get(FOLDER_VARIABLE)):
        return  # a mesh that nobody sets traps for
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
