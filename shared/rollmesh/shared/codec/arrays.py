"""Arrays as little-endian bytes: the convention of every `bytes` array field in `rollmesh.v1`.

Decoded arrays are views of the message's bytes, hence read-only; copy before writing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.codec.refusal import invalid
from rollmesh.shared.trajectory import FloatArray, IntArray, MaskArray


def encode_ints(values: IntArray) -> bytes:
    """i32le."""
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def encode_floats(values: FloatArray) -> bytes:
    """f32le."""
    return np.ascontiguousarray(values, dtype="<f4").tobytes()


def encode_mask(values: MaskArray) -> bytes:
    """u8, one byte per token."""
    return np.ascontiguousarray(values, dtype="u1").tobytes()


def decode_ints(data: bytes, field: str) -> IntArray:
    """i32le [n]; raises `InvalidInput` if `data` is no whole number of elements."""
    return _decode(data, "<i4", "i32le", field)


def decode_floats(data: bytes, field: str) -> FloatArray:
    """f32le [n]; raises `InvalidInput` if `data` is no whole number of elements."""
    return _decode(data, "<f4", "f32le", field)


def decode_mask(data: bytes) -> MaskArray:
    """u8 [n]."""
    return np.frombuffer(data, dtype="u1")


def _decode(data: bytes, dtype: str, name: str, field: str) -> NDArray[Any]:
    if len(data) % 4:
        invalid(field, f"{len(data)} bytes are no whole number of {name} values")
    return np.frombuffer(data, dtype=dtype)
