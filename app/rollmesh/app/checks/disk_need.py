"""Estimate how much disk a run may need, from its configuration and its model.

It is an upper bound per part, and each part names the setting that bounds it. `rollmesh train` prints it, with a
warning if the disk has less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollmesh.app.config import TrainConfig
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.store.disk import free_bytes

_OPTIMIZER_BYTES = 8
"""Per parameter: two moments of AdamW in float32."""
_HEADER_LENGTH_BYTES = 8
_VERSIONS_PER_NODE = 2
"""An inference node keeps the active version and the one it prepares."""
ARCHIVED_SAMPLE_BYTES = 200
"""Upper limit for a sample in archive segments, without the evidence of its rewards."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that one part of a run may need."""

    name: str
    num_bytes: int
    bound: str
    """The settings that bound it."""


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header; other fields are ignored."""

    shape: list[int] = []


def disk_need(config: TrainConfig, model: Path) -> list[Part]:
    """Return the parts of a run with the model in `model`."""
    weights, num_parameters = weights_of(model)
    learner, depot, streams = config.learner, config.depot, config.coordinator.streams
    checkpoints = (learner.keep_last + 1) * (weights + _OPTIMIZER_BYTES * num_parameters)
    nodes = config.counts.inference * _VERSIONS_PER_NODE * weights
    stored = streams.samples_bytes_max + streams.ledger_bytes_max + streams.dead_bytes_max
    parts = [
        Part("checkpoints", checkpoints, f"learner.keep_last {learner.keep_last}"),
        Part(
            "depot",
            min(depot.quota_bytes, (depot.versions_max + 1) * weights),
            f"depot.versions_max {depot.versions_max}",
        ),
        Part("nodes", nodes, f"counts.inference {config.counts.inference}"),
    ]
    if not config.bus.url:
        parts.append(Part("streams", stored, "coordinator.streams"))
    if config.archives_ledgers and config.run.updates_max:
        samples = config.run.updates_max * config.run.batch_groups * config.run.group_size
        parts.append(Part("ledger archive", samples * ARCHIVED_SAMPLE_BYTES, "run.updates_max"))
    if config.run.replay is not None and config.payloads_in_files:
        limit = config.run.replay.capacity_bytes
        parts.append(Part("replay log", limit, "run.replay.capacity_bytes"))
    if config.coordinator.run.retain_share:
        limit = config.coordinator.run.retained_bytes_max
        parts.append(Part("kept payloads", limit, "coordinator.run.retained_bytes_max"))
    return parts


def disk_text(parts: list[Part], folder: Path) -> str:
    """Return the parts in a line. It begins with "warning" if the disk of `folder` has less than the sum."""
    need, free = sum(part.num_bytes for part in parts), free_bytes(folder)
    listed = ", ".join(f"{part.name} {_size(part.num_bytes)} ({part.bound})" for part in parts)
    line = f"disk: up to {_size(need)}: {listed}; {_size(free)} free"
    return line if free >= need else f"warning: {line}; lower these settings, or use a larger disk"


def weights_of(model: Path) -> tuple[int, int]:
    """Return (bytes, parameters) of the safetensors files of a model; zeros if there are none."""
    files = sorted(model.glob("*.safetensors"))
    return sum(path.stat().st_size for path in files), sum(map(_num_parameters, files))


def _num_parameters(path: Path) -> int:
    """Read the number from the header (https://huggingface.co/docs/safetensors); if it is unreadable, derive it from
    the size in float32."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
            header = msgspec.json.decode(file.read(min(length, path.stat().st_size)), type=dict[str, _Tensor])
        return sum(math.prod(tensor.shape) for name, tensor in header.items() if name != "__metadata__")
    except UNDECODABLE:
        return path.stat().st_size // 4


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
