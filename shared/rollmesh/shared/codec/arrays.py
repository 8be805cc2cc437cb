"""Encode arrays as little-endian bytes, as in every `bytes` array field of `rollmesh.v1`.

Decoded arrays are views of the message's bytes and therefore read-only. Copy them before writing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.domain.trajectory import FloatArray, IntArray, MaskArray
from rollmesh.shared.errors import field_error
from rollmesh.v1 import types_pb2

DTYPES: Mapping[str, np.dtype[Any]] = {
    "f32le": np.dtype("<f4"),
    "f16le": np.dtype("<f2"),
    "i32le": np.dtype("<i4"),
    "u8": np.dtype("u1"),
}
"""Element types of `TokenArray.dtype`."""
_I32, _F32 = DTYPES["i32le"], DTYPES["f32le"]
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def encode_ints(values: IntArray) -> bytes:
    """Encode as i32le."""
    return values.astype(_I32, copy=False).tobytes()


def encode_floats(values: FloatArray) -> bytes:
    """Encode as f32le."""
    return values.astype(_F32, copy=False).tobytes()


def encode_mask(values: MaskArray) -> bytes:
    """Encode as u8, one byte per token."""
    return np.ascontiguousarray(values, dtype="u1").tobytes()


def decode_ints(data: bytes, field: str, name: str = "") -> IntArray:
    """Decode i32le [n]. Raises `InvalidInput` for `field`, or its part `name`, if the size is not a multiple of 4
    bytes."""
    if len(data) % 4:
        _refuse_size(data, "i32le", field, name)
    return np.frombuffer(data, dtype=_I32)


def decode_floats(data: bytes, field: str, name: str = "") -> FloatArray:
    """Decode f32le [n]. Raises `InvalidInput` as `decode_ints` does."""
    if len(data) % 4:
        _refuse_size(data, "f32le", field, name)
    return np.frombuffer(data, dtype=_F32)


def decode_mask(data: bytes) -> MaskArray:
    """Decode u8 [n]."""
    return np.frombuffer(data, dtype="u1")


def encode_array(values: NDArray[Any], field: str) -> types_pb2.TokenArray:
    """Encode an array of shape [n] or [n, k]. Raises `InvalidInput` for a type that is not one of `DTYPES`."""
    dtype = values.dtype.newbyteorder("<")
    if dtype not in _NAMES:
        raise field_error(f"{field}.dtype", f"be one of {', '.join(DTYPES)}", str(values.dtype))
    data = np.ascontiguousarray(values, dtype=dtype).tobytes()
    return types_pb2.TokenArray(dtype=_NAMES[dtype], shape=values.shape, inline=data)


def decode_array(message: types_pb2.TokenArray, field: str) -> NDArray[Any]:
    """Decode an inline array. Raises `InvalidInput` unless its bytes match its type and shape."""
    if message.HasField("blob_digest"):
        raise field_error(
            f"{field}.blob_digest",
            "be absent, because this version does not support it",
            message.blob_digest,
            "send the values inline",
        )
    if message.dtype not in DTYPES:
        raise field_error(f"{field}.dtype", f"be one of {', '.join(DTYPES)}", message.dtype)
    dtype, shape = DTYPES[message.dtype], tuple(message.shape)
    if len(shape) not in (1, 2) or min(shape) < 0:
        raise field_error(f"{field}.shape", "be [n] or [n, k]", list(shape[:8]))
    if (size := math.prod(shape) * dtype.itemsize) != len(message.inline):
        must = f"have {size} bytes for {message.dtype} of shape {list(shape)}"
        raise field_error(f"{field}.inline", must, len(message.inline))
    return np.frombuffer(message.inline, dtype=dtype).reshape(shape)


def _refuse_size(data: bytes, dtype: str, field: str, name: str) -> NoReturn:
    must = f"be a multiple of 4 bytes for {dtype}"
    raise field_error(f"{field}.{name}" if name else field, must, len(data))
