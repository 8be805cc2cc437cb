"""How much disk a run may come to need, from its configuration and its model: told at the start, and a warning if there is less.

An upper estimate, part by part; every part is bounded by a setting that is named with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rollmesh.cli.config import TrainConfig
from rollmesh.shared.disk import free_bytes

_OPTIMISER_BYTES = 8
"""Per parameter: two moments of AdamW in float32."""
_HEADER_LENGTH_BYTES = 8
_VERSIONS_PER_NODE = 2
"""An inference node keeps the active version and the one it prepares."""
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes that one part of a run may need."""

    name: str
    num_bytes: int
    bound: str
    """The settings that bound it."""


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header, as far as it is read."""

    shape: list[int] = []


def disk_need(config: TrainConfig, model: Path) -> list[Part]:
    """The parts of a run over the model in `model`."""
    weights, num_parameters = weights_of(model)
    learner, depot, streams = config.learner, config.depot, config.coordinator.streams
    checkpoints = (learner.keep_last + 1) * (weights + _OPTIMISER_BYTES * num_parameters)
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
    return parts


def in_words(parts: list[Part], layout: Path) -> str:
    """A line for people; begins with "warning" if `layout` has less than the sum."""
    need, free = sum(part.num_bytes for part in parts), free_bytes(layout)
    listed = ", ".join(f"{part.name} {_size(part.num_bytes)} ({part.bound})" for part in parts)
    line = f"disk: up to {_size(need)}: {listed}; {_size(free)} free"
    return line if free >= need else f"warning: {line}; lower these settings, or run where there is room"


def weights_of(model: Path) -> tuple[int, int]:
    """(bytes, parameters) of a model's safetensors files; zeros if there are none."""
    files = sorted(model.glob("*.safetensors"))
    return sum(path.stat().st_size for path in files), sum(map(_num_parameters, files))


def _num_parameters(path: Path) -> int:
    """From the header (https://huggingface.co/docs/safetensors); the file's size in float32 if that cannot be read."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_HEADER_LENGTH_BYTES), "little")
            header = msgspec.json.decode(file.read(min(length, path.stat().st_size)), type=dict[str, _Tensor])
        return sum(math.prod(tensor.shape) for name, tensor in header.items() if name != "__metadata__")
    except msgspec.DecodeError:
        return path.stat().st_size // 4


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"
