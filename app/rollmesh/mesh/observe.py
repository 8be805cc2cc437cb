"""All metrics of a mesh, and how its services are read for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rollmesh.services.coordinator import metrics as coordinator
from rollmesh.services.data import metrics as data
from rollmesh.services.gateway import metrics as gateway
from rollmesh.services.inference import metrics as inference
from rollmesh.services.learner import metrics as learner
from rollmesh.services.reward import metrics as reward
from rollmesh.services.rollout import metrics as rollout
from rollmesh.services.sandbox import metrics as sandbox
from rollmesh.shared.endpoints import metrics as endpoints
from rollmesh.shared.rpc.access import Tls
from rollmesh.shared.rpc.metrics_interceptor import CALL_SECONDS, CALLS
from rollmesh.shared.store.disk import free_bytes
from rollmesh.shared.telemetry.metrics import Metric, Reading, Source, gauge

VALUES_LISTED_MAX = 9
"""Labels with more fixed values are listed without them."""
_READINGS = {
    name: f"rollmesh.services.{'inference' if name == 'endpoint' else name}.readings"
    for name in ("coordinator", "data", "inference", "endpoint", "learner", "reward", "rollout", "sandbox")
}
"""Modules that read a node by its kind, imported with its service. Gateway and depot have none: they only count events
and calls."""


DISK_FREE = gauge(
    "rollmesh_disk_free_bytes", "Free bytes on the disk of the run folder, or of the folder of a joined node."
)
CERTIFICATE_EXPIRY = gauge(
    "rollmesh_certificate_expiry_timestamp_seconds",
    "Unix time at which the certificate of the process or its CA expires. Absent without TLS.",
)


def source_of(name: str, node: Any, folder: Path, tls: Tls | None) -> Source:
    """Return the reader of the service `name`, whose process writes below `folder` and uses `tls`. ConfigError if a
    certificate is not valid."""
    fixed = [] if tls is None else [Reading(CERTIFICATE_EXPIRY, tls.check())]
    module = _READINGS.get(name.partition("-")[0])
    return partial(_read, import_module(module).read if module else None, node, folder, fixed)


async def _read(
    reader: Callable[[Any], Awaitable[Iterable[Reading]]] | None, node: Any, folder: Path, fixed: Iterable[Reading]
) -> list[Reading]:
    state = [] if reader is None else await reader(node)
    return [*state, *fixed, Reading(DISK_FREE, free_bytes(folder))]


def catalog() -> tuple[Metric, ...]:
    """Return every metric of a mesh, by service."""
    modules = (coordinator, inference, rollout, sandbox, reward, data, gateway, learner, endpoints)
    return (
        *(metric for module in modules for metric in module.METRICS),
        CALLS,
        CALL_SECONDS,
        DISK_FREE,
        CERTIFICATE_EXPIRY,
    )


def to_markdown() -> str:
    """Return the catalog as the table of docs/observability.md."""
    rows = [
        f"| `{metric.name}` | {metric.kind} | {', '.join(_label(metric, label) for label in metric.labels) or '-'} | "
        f"{metric.help} |"
        for metric in catalog()
    ]
    return "\n".join(["| name | kind | labels | what it says |", "| --- | --- | --- | --- |", *rows])


def _label(metric: Metric, label: str) -> str:
    """Return a label with its values, unless there are many, as of gRPC codes."""
    values = metric.values.get(label, ())
    return f"{label} ({', '.join(values)})" if 0 < len(values) <= VALUES_LISTED_MAX else label
