"""Element types of weights: what the headers of safetensors files say, what a manifest states, and which conversions
are exact.

A safetensors file is a u64le length, a JSON header {name: {dtype, shape, data_offsets}}, then the data
(https://huggingface.co/docs/safetensors). Free of numpy, because thin clients publish too.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollmesh.shared.domain.text import count_of
from rollmesh.shared.errors import InvalidInput, field_error
from rollmesh.v1 import weights_pb2

HEADER_BYTES_MAX = 100 << 20
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16",
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip
"""Element types by their names in safetensors files."""
_EXACT = {
    "float64": {"float64"},
    "float32": {"float64", "float32"},
    "float16": {"float64", "float32", "float16"},
    "bfloat16": {"float64", "float32", "bfloat16"},
}
"""Types that hold every value of a type, by that type."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a safetensors file. `start` and `end` are offsets in the file, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a safetensors file by name. Raises `InvalidInput` if it is not such a file, OSError if it
    cannot be read."""
    with path.open("rb") as file:
        length, size_bytes = int.from_bytes(file.read(8), "little"), path.stat().st_size
        if not 2 <= length <= min(HEADER_BYTES_MAX, size_bytes - 8):
            raise InvalidInput(f"{path} is not a safetensors file; save the state dict with safetensors")
        try:
            header = json.loads(file.read(length))
            found = {
                name: TensorHeader(DTYPES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]), start, end)
                for name, entry in header.items()
                if name != "__metadata__"
                for start, end in [[8 + length + int(offset) for offset in entry["data_offsets"]]]
            }
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise InvalidInput(f"{path} has no readable safetensors header: {err}; save it again") from err
    for name, tensor in found.items():
        if not 8 + length <= tensor.start <= tensor.end <= size_bytes:
            raise InvalidInput(
                f"{path} has no readable safetensors header: tensor {name} is outside the file; save it again"
            )
    return found


def dtypes_of(paths: Iterable[Path]) -> dict[str, str]:
    """Return the element type of each tensor of these files. Raises like `tensor_headers`."""
    return {name: tensor.dtype for path in paths for name, tensor in tensor_headers(path).items()}


def state_precision(manifest: weights_pb2.WeightManifest, paths: Iterable[Path]) -> None:
    """Write the element type of most bytes to the manifest, and the tensors of other types as exceptions."""
    tensors = {name: tensor for path in paths for name, tensor in tensor_headers(path).items()}
    num_bytes: Counter[str] = Counter()
    others: dict[str, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        num_bytes[tensor.dtype] += tensor.end - tensor.start
        others[tensor.dtype].append(name)
    manifest.dtype = max(num_bytes, key=lambda dtype: (num_bytes[dtype], dtype), default="")
    others.pop(manifest.dtype, None)
    manifest.exceptions.extend(
        weights_pb2.TensorPrecision(dtype=dtype, tensors=sorted(names)) for dtype, names in sorted(others.items())
    )


def check_precision(manifest: weights_pb2.WeightManifest) -> None:
    """Raises `InvalidInput` for a type that does not exist, and for a tensor with two types."""
    known = set(DTYPES.values())
    must = f"be one of {', '.join(sorted(known))}"
    if manifest.dtype and manifest.dtype not in known:
        raise field_error("manifest.dtype", must, manifest.dtype, "name tensors of other types in `exceptions`")
    if manifest.exceptions and not manifest.dtype:
        raise field_error("manifest.dtype", "be set, because `exceptions` is", "")
    named: set[str] = set()
    for index, group in enumerate(manifest.exceptions):
        if group.dtype not in known - {manifest.dtype}:
            raise field_error(f"manifest.exceptions[{index}].dtype", f"{must}, other than `dtype`", group.dtype)
        if not group.tensors or named & set(group.tensors) or len(set(group.tensors)) < len(group.tensors):
            must = "name at least one tensor, and each tensor once"
            raise field_error(f"manifest.exceptions[{index}].tensors", must, list(group.tensors))
        named |= set(group.tensors)


def misstated(manifest: weights_pb2.WeightManifest, dtypes: Mapping[str, str]) -> str:
    """Return in words which tensor has another type than the manifest states; empty if none has, or nothing is
    stated."""
    if not manifest.dtype:
        return ""
    stated = {name: group.dtype for group in manifest.exceptions for name in group.tensors}
    for name, dtype in dtypes.items():
        if dtype != (expected := stated.get(name, manifest.dtype)):
            return f"tensor {name} is {dtype}, but the manifest states {expected}"
    if absent := sorted(set(stated) - set(dtypes)):
        return f"the manifest states the type of tensor {absent[0]}, which no file has"
    return ""


def rounded(dtypes: Mapping[str, str], dtype: str) -> list[str]:
    """Return the tensors whose values an engine that computes in `dtype` would have to round. Empty `dtype`: unknown,
    none."""
    return [name for name, own in dtypes.items() if dtype and own in _EXACT and dtype not in _EXACT[own]]


def precision_text(manifest: weights_pb2.WeightManifest) -> str:
    """Return the precision for display, such as "bfloat16, 2 tensors float32"."""
    parts = [f"{count_of(len(group.tensors), 'tensor')} {group.dtype}" for group in manifest.exceptions]
    return ", ".join([manifest.dtype or "not stated", *parts])
