"""Read and check weight files without torch, for engines whose model runs in another process.

The format is safetensors: eight bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.shared.weights.manifest import ADAPTER_WEIGHTS

Shapes = dict[str, tuple[int, ...]]

_HEADER_BYTES_MAX = 100_000_000
_BLOCK_BYTES = 64 << 20
"""Values are checked in blocks of this size, which bounds the memory."""


def check_files(files: Mapping[str, Path], expected: Mapping[str, tuple[int, ...]] | None) -> Shapes:
    """Check the files, and return the shape of each tensor. Without `expected`, every set of finite tensors is accepted.

    Raises WeightsMismatch naming the first tensor that is missing, unknown, not finite or has another shape.
    """
    found: Shapes = {}
    if ADAPTER_WEIGHTS in files:
        raise WeightsMismatch("attached servers take whole weights: merge the adapter before it is published")
    for name in sorted(files):
        for key, shape, blocks in _tensors(name, files[name]):
            if not all(map(_is_finite, blocks)):
                raise WeightsMismatch(f"tensor {key} has a value that is NaN or infinite: the update diverged")
            found[key] = shape
    for key, shape in (expected or {}).items():
        if key not in found:
            raise WeightsMismatch(f"tensor {key} is missing: send the whole state dict")
        if found[key] != tuple(shape):
            raise WeightsMismatch(f"tensor {key} has shape {list(found[key])}, the model needs {list(shape)}")
    for key in found:
        if expected is not None and key not in expected:
            raise WeightsMismatch(f"tensor {key} does not belong to this model")
    return found


def folder_shapes(folder: Path) -> Shapes | None:
    """Return the shape of each tensor in the safetensors files of a model folder; None if it has none."""
    files = {path.name: path for path in sorted(folder.glob("*.safetensors"))}
    return {key: shape for name, path in files.items() for key, shape, _ in _tensors(name, path)} or None


def _tensors(name: str, path: Path) -> Iterator[tuple[str, tuple[int, ...], Iterator[NDArray[np.generic]]]]:
    """Yield name, shape and blocks of values of each tensor. Values of a type without NaN have no blocks."""
    try:
        data = np.memmap(path, np.uint8, mode="r")
        size = int.from_bytes(data[:8].tobytes(), "little")
        if not 0 < size <= min(_HEADER_BYTES_MAX, len(data) - 8):
            raise ValueError("the header length is out of range")
        header = json.loads(data[8 : 8 + size].tobytes())
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            start, end = (8 + size + int(offset) for offset in entry["data_offsets"])
            if not 8 + size <= start <= end <= len(data):
                raise ValueError(f"tensor {key} is outside the file")
            yield key, tuple(entry["shape"]), _blocks(data[start:end], entry["dtype"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsMismatch(f"file {name} at {path} is not readable safetensors: {error}") from error


def _blocks(data: NDArray[np.uint8], dtype: str) -> Iterator[NDArray[np.generic]]:
    kinds = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "BF16": "<u2"}
    for start in range(0, len(data) if dtype in kinds else 0, _BLOCK_BYTES):
        yield np.frombuffer(data[start : start + _BLOCK_BYTES].tobytes(), kinds[dtype])


def _is_finite(block: NDArray[np.generic]) -> bool:
    if block.dtype == np.uint16:  # bfloat16: all ones in the exponent
        return not bool(((block & np.uint16(0x7F80)) == 0x7F80).any())  # type: ignore[operator]
    return bool(np.isfinite(block).all())
