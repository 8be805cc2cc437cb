"""The second buffer: weights loaded, checked and laid out beside the active ones.

Invariants: a version is in the buffer only if every tensor was present, of the right shape, floating and finite; loading
happens on a thread of its own and never touches the active weights; at most `prepared_max` versions are held.
Collaborators: `torch_engine` loads and activates, `torch_model.Weights` is the product.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollmesh.services.inference.engine import WeightsRejected
from rollmesh.services.inference.engines.model_spec import ModelSpec
from rollmesh.services.inference.engines.torch_model import Weights
from rollmesh.shared.versions import PolicyVersion

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HEAD, _EMBED = "lm_head.weight", "model.embed_tokens.weight"


class WeightsBuffer:
    """Prepared versions, by version. Safe to use from the event loop and the compute thread."""

    def __init__(self, prepared_max: int) -> None:
        self._prepared_max = prepared_max
        self._lock = threading.Lock()
        self._prepared: OrderedDict[PolicyVersion, Weights] = OrderedDict()

    def __contains__(self, version: PolicyVersion) -> bool:
        with self._lock:
            return version in self._prepared

    def put(self, version: PolicyVersion, weights: Weights) -> None:
        with self._lock:
            self._prepared[version] = weights
            while len(self._prepared) > self._prepared_max:
                self._prepared.popitem(last=False)

    def take(self, version: PolicyVersion) -> Weights:
        """Raises KeyError if the version is not prepared."""
        with self._lock:
            return self._prepared.pop(version)

    def discard(self, version: PolicyVersion) -> None:
        with self._lock:
            self._prepared.pop(version, None)


def load_weights(spec: ModelSpec, files: Mapping[str, Path], dtype: torch.dtype, device: torch.device) -> Weights:
    """Read safetensors files that together hold one state dict. Raises WeightsRejected naming the first bad tensor."""
    state: dict[str, Tensor] = {}
    for name in sorted(files):
        for key, tensor in _read_file(name, files[name]):
            if key in state:
                raise WeightsRejected(f"tensor {key} is in two files, the second is {name}: send each tensor once")
            state[key] = tensor
    _check(spec, state)
    return fuse(spec, {name: tensor.to(device=device, dtype=dtype) for name, tensor in state.items()})


def _read_file(name: str, path: Path) -> list[tuple[str, Tensor]]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return [(key, file.get_tensor(key)) for key in file.keys()]  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as error:
        raise WeightsRejected(f"file {name} at {path} is not readable safetensors: {error}") from error


def _check(spec: ModelSpec, state: dict[str, Tensor]) -> None:
    expected = spec.tensor_shapes()
    if spec.tied and _HEAD in state:
        _check_tied(state)
    for name, shape in expected.items():
        if name not in state:
            raise WeightsRejected(f"tensor {name} is missing: send the whole state dict under its transformers names")
        _check_tensor(name, state[name], shape)
    for name in state:
        if name not in expected:
            raise WeightsRejected(
                f"tensor {name} does not belong to this model: send weights of the configured model only"
            )


def _check_tied(state: dict[str, Tensor]) -> None:
    """A tied head sent along is redundant; one that differs would be silently ignored, so it is refused."""
    head = state.pop(_HEAD)
    if _EMBED in state and not torch.equal(head, state[_EMBED]):
        raise WeightsRejected(
            f"tensor {_HEAD} differs from {_EMBED}, but config.json ties them: send them equal or untie the config"
        )


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise WeightsRejected(
            f"tensor {name} has shape {list(tensor.shape)}, the model needs {list(shape)}: is this the configured model?"
        )
    if tensor.dtype not in _FLOATS:
        raise WeightsRejected(f"tensor {name} has dtype {tensor.dtype}: send float32, bfloat16 or float16")
    if not bool(torch.isfinite(tensor).all()):
        raise WeightsRejected(f"tensor {name} has a value that is NaN or infinite: the update that made it went wrong")


def fuse(spec: ModelSpec, state: Mapping[str, Tensor]) -> Weights:
    """Lay a checked state dict out for `x @ w`: query, key, value in one matrix, gate and up in another."""

    def per_layer(*names: str) -> list[list[Tensor]]:
        return [[state[f"model.layers.{layer}.{name}"] for name in names] for layer in range(spec.num_layers)]

    def fused(*names: str) -> list[Tensor]:
        return [torch.cat(parts).t().contiguous() for parts in per_layer(*(f"{name}.weight" for name in names))]

    def vectors(name: str) -> list[Tensor]:
        return [parts[0].clone() for parts in per_layer(name)]

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    embed = state[_EMBED].clone()
    return Weights(
        embed=embed,
        head=(embed if spec.tied else state[_HEAD].clone()).t(),
        norm=state["model.norm.weight"].clone(),
        attn_norm=vectors("input_layernorm.weight"),
        qkv=fused(*qkv),
        qkv_bias=[torch.cat(parts) for parts in per_layer(*(f"{name}.bias" for name in qkv))] if spec.qkv_bias else [],
        qk_norm=_qk_norm(spec, state) if spec.qk_norm else [],
        out=fused("self_attn.o_proj"),
        out_bias=vectors("self_attn.o_proj.bias") if spec.out_bias else [],
        mlp_norm=vectors("post_attention_layernorm.weight"),
        gate_up=fused("mlp.gate_proj", "mlp.up_proj"),
        down=fused("mlp.down_proj"),
    )


def _qk_norm(spec: ModelSpec, state: Mapping[str, Tensor]) -> list[Tensor]:
    """One row per query and key head, so that both are normalised in one pass."""
    rows = []
    for layer in range(spec.num_layers):
        q = state[f"model.layers.{layer}.self_attn.q_norm.weight"].expand(spec.num_heads, -1)
        k = state[f"model.layers.{layer}.self_attn.k_norm.weight"].expand(spec.num_kv_heads, -1)
        rows.append(torch.cat((q, k)).contiguous())
    return rows
