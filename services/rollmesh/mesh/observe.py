"""All metrics of a mesh, and how its services are read for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from rollmesh.services.coordinator import metrics as coordinator
from rollmesh.services.coordinator import readings as coordinator_readings
from rollmesh.services.data import metrics as data
from rollmesh.services.data import readings as data_readings
from rollmesh.services.gateway import metrics as gateway
from rollmesh.services.inference import metrics as inference
from rollmesh.services.inference import readings as inference_readings
from rollmesh.services.learner import metrics as learner
from rollmesh.services.learner import readings as learner_readings
from rollmesh.services.reward import metrics as reward
from rollmesh.services.reward import readings as reward_readings
from rollmesh.services.rollout import metrics as rollout
from rollmesh.services.rollout import readings as rollout_readings
from rollmesh.services.sandbox import metrics as sandbox
from rollmesh.services.sandbox import readings as sandbox_readings
from rollmesh.shared.rpc.metrics_interceptor import CALL_SECONDS, CALLS
from rollmesh.shared.telemetry.metrics import Metric, Reading, Source

_READERS: dict[str, Callable[[Any], Awaitable[Iterable[Reading]]]] = {
    "coordinator": coordinator_readings.read,
    "data": data_readings.read,
    "inference": inference_readings.read,
    "learner": learner_readings.read,
    "reward": reward_readings.read,
    "rollout": rollout_readings.read,
    "sandbox": sandbox_readings.read,
}
"""Readers by kind of node. The gateway and the depot have no reader; they only count events and calls."""


def source_of(name: str, node: Any) -> Source | None:
    """Return the reader of the service `name`."""
    reader = _READERS.get(name.partition("-")[0])
    return None if reader is None else partial(reader, node)


def catalog() -> tuple[Metric, ...]:
    """Return every metric of a mesh, by service."""
    modules = (coordinator, inference, rollout, sandbox, reward, data, gateway, learner)
    return (*(metric for module in modules for metric in module.METRICS), CALLS, CALL_SECONDS)


def to_markdown() -> str:
    """Return the catalog as the table of docs/observability.md."""
    rows = [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels) or '-'} | {metric.help} |"
        for metric in catalog()
    ]
    return "\n".join(["| name | kind | labels | what it says |", "| --- | --- | --- | --- |", *rows])
