"""The values of safetensors files, in blocks, for checks without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.weights.precision import TensorHeader, tensor_headers

_BLOCK_BYTES = 64 << 20
"""Values are checked in blocks of this size, which bounds the memory."""
_KINDS = {"float32": "<f4", "float16": "<f2", "float64": "<f8", "bfloat16": "<u2"}


def first_not_finite(path: Path) -> str:
    """Return the first tensor of a file that has a value which is NaN or infinite; empty if all are finite. Blocks.

    Types of fewer than 16 bits are not checked. Raises `InvalidInput` if it is not a safetensors file, OSError.
    """
    headers = tensor_headers(path)
    data = np.memmap(path, np.uint8, mode="r")
    return next((name for name, tensor in headers.items() if not all(map(_is_finite, _blocks(data, tensor)))), "")


def _blocks(data: NDArray[np.uint8], tensor: TensorHeader) -> Iterator[NDArray[np.generic]]:
    for start in range(tensor.start, tensor.end if tensor.dtype in _KINDS else tensor.start, _BLOCK_BYTES):
        yield np.frombuffer(data[start : min(start + _BLOCK_BYTES, tensor.end)].tobytes(), _KINDS[tensor.dtype])


def _is_finite(block: NDArray[np.generic]) -> bool:
    if block.dtype == np.uint16:  # bfloat16: all ones in the exponent
        return not bool(((block & np.uint16(0x7F80)) == 0x7F80).any())  # type: ignore[operator]
    return bool(np.isfinite(block).all())
