"""Check weight files without torch, for engines whose model runs in another process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.shared.errors import InvalidInput
from rollmesh.shared.weights.finite import first_not_finite
from rollmesh.shared.weights.manifest import ADAPTER_WEIGHTS
from rollmesh.shared.weights.precision import TensorHeader, tensor_headers

Shapes = dict[str, tuple[int, ...]]


def check_files(files: Mapping[str, Path], expected: Mapping[str, tuple[int, ...]] | None) -> Shapes:
    """Check the files, and return the shape of each tensor. Without `expected`, every set of finite tensors is
    accepted.

    Raises WeightsMismatch naming the first tensor that is missing, unknown, not finite or has another shape.
    """
    found: Shapes = {}
    if ADAPTER_WEIGHTS in files:
        raise WeightsMismatch("attached servers take whole weights: merge the adapter before it is published")
    for name in sorted(files):
        found |= {key: tensor.shape for key, tensor in _headers(name, files[name]).items()}
        if key := first_not_finite(files[name]):
            raise WeightsMismatch(f"tensor {key} has a value that is NaN or infinite: the update diverged")
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
    return {key: tensor.shape for name, path in files.items() for key, tensor in _headers(name, path).items()} or None


def _headers(name: str, path: Path) -> dict[str, TensorHeader]:
    try:
        return tensor_headers(path)
    except (OSError, InvalidInput) as error:
        raise WeightsMismatch(f"file {name} at {path} is not readable safetensors: {error}") from error
