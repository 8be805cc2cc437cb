"""The information that a process reports when its nodes join a mesh: build, host, and addresses of metrics and
spans."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from functools import cache
from importlib import metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """The fields of `ProcessInfo` in coordinator.proto."""

    version: str = ""
    """Version of the installed package; empty if it is not installed."""
    host: str = ""
    metrics_address: str = ""
    """host:port of /metrics; empty without metrics."""
    traces_folder: str = ""
    """Folder of the span files; empty if there are none."""


@cache
def installed_version() -> str:
    """Version of the installed package; empty if it runs from a source tree that is not installed."""
    try:
        return metadata.version("rollmesh")
    except metadata.PackageNotFoundError:
        return ""


_observed = ProcessInfo()


def observe_at(*, metrics_address: str, traces_folder: str) -> None:
    """Record where this process serves its metrics and writes its spans; empty if it does not."""
    global _observed
    _observed = replace(_observed, metrics_address=metrics_address, traces_folder=traces_folder)


def this_process() -> ProcessInfo:
    """Return the current information of this process."""
    return replace(_observed, version=installed_version(), host=socket.gethostname())
