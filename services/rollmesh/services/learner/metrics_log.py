"""Write metrics per update to `metrics.jsonl` and to TensorBoard event files.

A line: {"update": 12, "incarnation": 0, "outcome": "APPLIED", "time_unix_s": ..., "metrics": {...}, "seconds": {...}}.
The learner writes it before the checkpoint of the update, so that every update of a checkpoint has a line after a
crash. After a roll-back, lines of void updates remain, and the same updates follow with a higher incarnation. The last
line of an update is valid. The tensorboard package writes event files without tensorflow and torch. Without the package
they are omitted.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rollmesh.shared.domain.decoding import UNDECODABLE

_log = logging.getLogger(__name__)
_LINE_BYTES_MAX = 1 << 16


SHOWN = (
    ("kl", "kl"),
    ("entropy", "entropy"),
    ("gradient norm", "grad_norm"),
    ("ess", "ess"),
    ("length", "length/used_mean"),
    ("lr", "lr"),
)
"""Metrics of an update that every view shows, with their labels."""


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of metrics.jsonl. A number that is not finite is written as null."""

    update: int
    incarnation: int
    outcome: str
    time_unix_s: float
    metrics: dict[str, float | None]
    seconds: dict[str, float]
    """Seconds spent per phase since the last line. A line is written before the checkpoint and the publication of its
    update, so the next line has their seconds."""


class MetricsLog:
    """Append metrics per update. Open until `close`."""

    def __init__(self, folder: Path, *, tensorboard: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "metrics.jsonl").open("a+b")
        _cut_partial_line(self._file)
        self._events = EventFile(folder) if tensorboard else None
        self._seconds: Mapping[str, float] = {}

    def append(
        self,
        *,
        update: int,
        incarnation: int,
        outcome: str,
        time_unix_s: float,
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
    ) -> None:
        """Write one update. `seconds` are totals; the line holds the difference to the previous line."""
        grown = {name: value - self._seconds.get(name, 0.0) for name, value in seconds.items()}
        self._seconds = dict(seconds)
        line = MetricsLine(
            update=update,
            incarnation=incarnation,
            outcome=outcome,
            time_unix_s=time_unix_s,
            metrics=dict(metrics),
            seconds=grown,
        )
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        if self._events is not None:
            scalars = {**metrics, **{f"seconds/{name}": value for name, value in grown.items()}}
            self._events.add(update, time_unix_s, scalars)

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


class EventFile:
    """An event file of a run. TensorBoard shows all event files of a folder as one run. Open until `close`."""

    def __init__(self, run_folder: Path) -> None:
        self._writer = _event_writer(run_folder / "tensorboard")

    def add(self, step: int, time_unix_s: float, scalars: Mapping[str, float]) -> None:
        if self._writer is not None:
            self._writer.add_event(_event(step, time_unix_s, scalars))
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _cut_partial_line(file: BinaryIO) -> None:
    """Remove a last line without its end, which a full disk or a crash of the host leaves, because the next line would
    continue it."""
    begin = file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE_BYTES_MAX))
    end = file.read().rfind(b"\n") + 1
    if end or not begin:
        file.truncate(begin + end)


def read_metrics(path: Path) -> dict[int, MetricsLine]:
    """Return the lines of a metrics.jsonl by update; for an update repeated after a roll-back, the newer line.

    Void updates that are not repeated yet are included. Raise ValueError with the number of a malformed line.
    """
    lines: dict[int, MetricsLine] = {}
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = msgspec.json.decode(raw, type=MetricsLine)
            except UNDECODABLE as err:
                raise ValueError(f"{path}:{number}: {err}") from err
            lines[line.update] = line
    return lines


def newest_metrics(path: Path) -> dict[str, float | None]:
    """Return the metrics of the last complete line of a metrics.jsonl, or {} without a line. Safe during writes."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LINE_BYTES_MAX))
            lines = file.read().split(b"\n")[:-1]
        return msgspec.json.decode(lines[-1], type=MetricsLine).metrics if lines else {}
    except (OSError, *UNDECODABLE):
        return {}


def _event_writer(folder: Path) -> Any:
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ModuleNotFoundError:
        _log.warning("tensorboard is not installed, so metrics are only in metrics.jsonl (pip install tensorboard)")
        return None
    return EventFileWriter(str(folder))


def _event(update: int, time_unix_s: float, scalars: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    values = [Summary.Value(tag=n, simple_value=v) for n, v in scalars.items() if math.isfinite(v)]
    return Event(wall_time=time_unix_s, step=update, summary=Summary(value=values))
