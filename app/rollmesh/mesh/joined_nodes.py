"""Metrics targets and span folders of nodes that joined from outside the run folder, stored beside those of the run's
processes.

    RUN/metrics/joined.json   targets for Prometheus' `file_sd_configs`, like the files of the run's processes
    RUN/traces/joined.json    folders of span files, for `rollmesh trace`

The process of the coordinator writes both from the `ProcessInfo` that the nodes report.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.store.whole_files import write_whole
from rollmesh.shared.telemetry.span_file import FOLDER as TRACES
from rollmesh.v1 import coordinator_pb2

METRICS = "metrics"
FILE = "joined.json"
LOOK_S = 2.0
"""Seconds between two checks of the fleet."""
_GONE = (coordinator_pb2.NODE_STATE_DEAD,)
_log = logging.getLogger(__name__)


class JoinedFolder(msgspec.Struct, frozen=True, kw_only=True):
    """The span folder of a joined node."""

    node: str
    host: str
    folder: str


async def keep_joined(
    nodes: Callable[[], Iterable[coordinator_pb2.FleetNode]], run_dir: Path, clock: Clock | None = None
) -> None:
    """Write both files whenever they change, until cancelled."""
    clock = clock or SystemClock()
    writing: asyncio.Task[None] | None = None
    try:
        while True:
            writing = asyncio.create_task(asyncio.to_thread(_write_both, list(nodes()), run_dir))
            await asyncio.shield(writing)
            await clock.sleep(LOOK_S)
    finally:
        if writing is not None:
            await writing  # else it could write after the removal
        for folder in (METRICS, TRACES):
            (run_dir / folder / FILE).unlink(missing_ok=True)


def read_joined_folders(run_dir: Path) -> list[JoinedFolder]:
    """Return the span folders of nodes that joined a mesh. The mesh is running, or its coordinator was killed."""
    try:
        return msgspec.json.decode((run_dir / TRACES / FILE).read_bytes(), type=list[JoinedFolder])
    except (OSError, *UNDECODABLE):
        return []


def _targets(nodes: Sequence[coordinator_pb2.FleetNode], run_dir: Path) -> list[dict[str, Any]]:
    own = {target for path in (run_dir / METRICS).glob("*.json") if path.name != FILE for target in _targets_in(path)}
    return [
        {"targets": [node.process.metrics_address], "labels": {"process": node.node_id, "host": node.process.host}}
        for node in nodes
        if node.state not in _GONE and node.process.metrics_address and node.process.metrics_address not in own
    ]


def _targets_in(path: Path) -> list[str]:
    try:
        return [target for entry in json.loads(path.read_text()) for target in entry["targets"]]
    except (OSError, ValueError):  # removed or being written by its process
        return []


def _folders(nodes: Sequence[coordinator_pb2.FleetNode], run_dir: Path) -> list[JoinedFolder]:
    own = str((run_dir / TRACES).resolve())
    return [
        JoinedFolder(node=node.node_id, host=node.process.host, folder=node.process.traces_folder)
        for node in nodes
        if node.process.traces_folder and node.process.traces_folder != own
    ]


def _write_both(nodes: Sequence[coordinator_pb2.FleetNode], run_dir: Path) -> None:
    _write(run_dir / METRICS, _targets(nodes, run_dir))
    _write(run_dir / TRACES, msgspec.to_builtins(_folders(nodes, run_dir)))


def _write(folder: Path, entries: list[Any]) -> None:
    """Write the file whole if it differs; remove it if there is nothing to list."""
    path = folder / FILE
    try:
        if not entries:
            path.unlink(missing_ok=True)
            return
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(entries) + "\n"
        if not path.exists() or path.read_text() != text:
            write_whole(path, text.encode(), private=False)
    except OSError as error:
        _log.warning("cannot write %s: %s; joined nodes are missing in it", path, error.strerror)
