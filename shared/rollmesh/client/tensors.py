"""Weights as a safetensors file, written without any array library.

Format: u64le length of a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://huggingface.co/docs/safetensors). Equal weights give equal bytes in any order of the mapping, because a version
that is published again must have the same digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollmesh.shared.errors import field_error
from rollmesh.shared.weights import precision

_BYTES = {"F32": 4, "F16": 2, "F64": 8, "BF16": 2, "I64": 8, "I32": 4}
DTYPES = {precision.DTYPES[short]: short for short in _BYTES}
"""The element types that are written, and their names in the file."""


class Array(Protocol):
    """A numpy array, or a torch tensor after `.numpy()`, in C order and little-endian."""

    @property
    def dtype(self) -> Any:
        """Its text is e.g. "float32"."""
        ...

    @property
    def shape(self) -> Sequence[int]: ...

    def tobytes(self) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor as bytes, for types that the array library does not support (bfloat16)."""

    dtype: str
    """One of `DTYPES`."""
    shape: Sequence[int]
    data: bytes
    """Little-endian, in C order."""

    def tobytes(self) -> bytes:
        return self.data


def write_safetensors(weights: Mapping[str, Array], path: Path) -> None:
    """Write one file, tensor by tensor. Raise `InvalidInput` with the name of a tensor of a wrong type or size."""
    names = sorted(weights)
    header, end = {}, 0
    for name in names:
        begin, end = end, end + _num_bytes(name, weights[name])
        dtype, shape = DTYPES[str(weights[name].dtype)], list(weights[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            data = weights[name].tobytes()
            if len(data) != (expected := _num_bytes(name, weights[name])):
                raise field_error(f"weights[{name}]", f"have {expected} bytes for its shape", len(data))
            file.write(data)


def _num_bytes(name: str, tensor: Array) -> int:
    dtype = str(tensor.dtype)
    if dtype not in DTYPES:
        raise field_error(f"weights[{name}].dtype", f"be one of {', '.join(DTYPES)}", dtype)
    size = _BYTES[DTYPES[dtype]]
    for length in tensor.shape:
        size *= length
    return size
