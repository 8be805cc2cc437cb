"""The second buffer: weights that are loaded, checked and laid out beside the active ones.

Invariants: a version is in the buffer only if its runner has accepted every tensor and all values are finite; loading
happens on a separate thread and never touches the active weights; at most `prepared_max` versions are held.
Collaborators: `torch.engine` loads and activates, a `torch.runner` lays the weights out.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollmesh.services.inference.engine import WeightsMismatch
from rollmesh.services.inference.engines.common.adapters import Adapter, base_files
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.weights.manifest import ADAPTER_WEIGHTS

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
W = TypeVar("W")


class WeightsBuffer(Generic[W]):
    """The prepared weights by version. Safe to use from the event loop and the compute thread."""

    def __init__(self, prepared_max: int) -> None:
        self._prepared_max = prepared_max
        self._lock = threading.Lock()
        self._prepared: OrderedDict[PolicyVersion, W] = OrderedDict()

    def __contains__(self, version: PolicyVersion) -> bool:
        with self._lock:
            return version in self._prepared

    def put(self, version: PolicyVersion, weights: W) -> None:
        with self._lock:
            self._prepared[version] = weights
            while len(self._prepared) > self._prepared_max:
                self._prepared.popitem(last=False)

    def take(self, version: PolicyVersion) -> W:
        """Remove and return the weights of a version. Raises KeyError if it is not prepared."""
        with self._lock:
            return self._prepared.pop(version)

    def discard(self, version: PolicyVersion) -> None:
        with self._lock:
            self._prepared.pop(version, None)


def read_state(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Read safetensors files that together contain one state dict, and merge the adapter if they have one.

    Raises WeightsMismatch for a file that is not readable, a tensor that occurs twice, has a dtype that is not
    supported, or has a value that is not finite.
    """
    state: dict[str, Tensor] = {}
    base = base_files(files)
    for name in sorted(base):
        for key, tensor in _read_file(name, base[name]):
            if key in state:
                raise WeightsMismatch(f"tensor {key} is in two files, the second is {name}: send each tensor once")
            check_values(key, tensor)
            state[key] = tensor
    if ADAPTER_WEIGHTS in files:
        adapter = Adapter(files)
        for key in state:
            adapter.merge_into(state, key)
        adapter.check_used()
    return state


def _read_file(name: str, path: Path) -> list[tuple[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return [(key, file.get_tensor(key)) for key in file.keys()]  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise WeightsMismatch(f"file {name} at {path} is not readable safetensors: {error}") from error


def check_values(name: str, tensor: Tensor) -> None:
    """Check dtype and values. Integer tensors pass, because they are buffers of a model that transformers runs."""
    if tensor.is_floating_point() and tensor.dtype not in _FLOATS:
        raise WeightsMismatch(f"tensor {name} has dtype {tensor.dtype}: send float32, bfloat16 or float16")
    if not bool(torch.isfinite(tensor).all()):
        raise WeightsMismatch(
            f"tensor {name} has a value that is NaN or infinite: the update diverged, or the file is damaged"
        )
