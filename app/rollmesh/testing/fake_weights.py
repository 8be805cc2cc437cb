"""Check weights for the fake engine. It reads safetensors files with json and numpy only.

The format: eight bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollmesh.services.inference.engine import WeightsMismatch

_HEADER_BYTES_MAX = 100_000_000


def check_files(files: Mapping[str, Path], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Check the files. Raises WeightsMismatch naming the first tensor that is missing, not finite or has another
    shape."""
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted(files):
        for key, shape, values in _read(name, files[name]):
            if values is not None and not np.isfinite(values).all():
                raise WeightsMismatch(f"tensor {key} has a value that is NaN or infinite: the update diverged")
            found[key] = shape
    for key, shape in expected.items():
        if key not in found:
            raise WeightsMismatch(f"tensor {key} is missing: send the whole state dict")
        if found[key] != tuple(shape):
            raise WeightsMismatch(f"tensor {key} has shape {list(found[key])}, the model needs {list(shape)}")
    for key in found:
        if expected and key not in expected:
            raise WeightsMismatch(f"tensor {key} does not belong to this model")


def _read(name: str, path: Path) -> Iterator[tuple[str, tuple[int, ...], NDArray[np.float32] | None]]:
    """Yield name, shape and, for known types, values of each tensor."""
    try:
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        if not 0 < size <= min(_HEADER_BYTES_MAX, len(data) - 8):
            raise ValueError("the header length is out of range")
        header = json.loads(data[8 : 8 + size])
        for key, entry in header.items():
            if key != "__metadata__":
                start, end = (8 + size + offset for offset in entry["data_offsets"])
                yield key, tuple(entry["shape"]), _values(data[start:end], entry["dtype"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsMismatch(f"file {name} at {path} is not readable safetensors: {error}") from error


def _values(data: bytes, dtype: str) -> NDArray[np.float32] | None:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    kinds = {"F32": "<f4", "F16": "<f2", "F64": "<f8"}
    return np.frombuffer(data, kinds[dtype]).astype(np.float32) if dtype in kinds else None
