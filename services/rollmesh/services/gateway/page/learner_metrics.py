"""The metrics of the learner, which are in a file on its host: metrics.jsonl of the run folder.

A gateway on another host answers with the reason why it has none. What the trainer reports to the coordinator is in the
history.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.services.gateway.page.history import POINTS_MAX
from rollmesh.services.gateway.page.parts import PageParts
from rollmesh.shared.domain.decoding import UNDECODABLE

FILE_BYTES_MAX = 64 << 20
"""Only this many bytes at the end of the file are read."""


class _LearnerLine(msgspec.Struct, frozen=True):
    """The fields of a line that are shown. `learner.metrics_log` writes more."""

    update: int
    metrics: dict[str, float | None] = {}
    seconds: dict[str, float] = {}


class LearnerMetrics:
    """Reads the file when a page requests it, and again when it has changed."""

    def __init__(self, parts: PageParts) -> None:
        self._parts = parts
        self._read: tuple[tuple[int, int], dict[str, Any]] | None = None
        self._one = asyncio.Lock()

    async def read(self, run: str) -> dict[str, Any]:
        """Return {"missing": reason, "updates": [...], "metrics": {name: [...]}, "seconds": {phase: [...]}}."""
        path = self._parts.metrics
        if path is None or run != self._parts.run:
            return _missing(
                "The metrics of the learner are in metrics.jsonl on its host, which this gateway cannot read."
            )
        async with self._one:
            return await asyncio.to_thread(self._newest, path)

    def _newest(self, path: Path) -> dict[str, Any]:
        try:
            stat = path.stat()
            stamp = (stat.st_size, stat.st_mtime_ns)
            if self._read is None or self._read[0] != stamp:
                self._read = (stamp, _columns(_lines(path, stat.st_size)))
        except FileNotFoundError:
            return _missing("The learner has not written metrics yet, or runs on another host.")
        except OSError as error:
            return _missing(f"{path.name} cannot be read: {error.strerror}")
        return self._read[1]


def _lines(path: Path, size: int) -> dict[int, _LearnerLine]:
    """Return the newest line per update, and of those before an update only the ones that it follows."""
    found: dict[int, _LearnerLine] = {}
    with path.open("rb") as file:
        file.seek(max(0, size - FILE_BYTES_MAX))
        for raw in file.read(FILE_BYTES_MAX).split(b"\n"):
            try:
                line = msgspec.json.decode(raw, type=_LearnerLine)
            except UNDECODABLE:
                continue  # the rest of a line that was cut, or a line that is being written
            found.pop(line.update, None)
            found[line.update] = line
    return found


def _columns(lines: dict[int, _LearnerLine]) -> dict[str, Any]:
    chosen = [lines[update] for update in sorted(lines)]
    chosen = chosen[:: -(-len(chosen) // POINTS_MAX) or 1]
    names = sorted({name for line in chosen for name in line.metrics})
    phases = sorted({name for line in chosen for name in line.seconds})
    return {
        "missing": "" if chosen else "The learner has not written metrics yet.",
        "updates": [line.update for line in chosen],
        "metrics": {name: [line.metrics.get(name) for line in chosen] for name in names},
        "seconds": {name: [line.seconds.get(name) for line in chosen] for name in phases},
    }


def _missing(why: str) -> dict[str, Any]:
    return {"missing": why, "updates": [], "metrics": {}, "seconds": {}}
