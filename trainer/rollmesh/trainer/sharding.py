"""Divide a model's weights, gradients and optimizer state between ranks, with FSDP2
(`torch.distributed.fsdp.fully_shard`), round them to the precision of the computation, and store them on the host.

Each decoder layer is a unit: its weights are gathered before its forward and its backward, and released after them.
Embeddings, the last norm and the output layer are one more unit, whose weights stay from the forward to the backward,
so that the output layer can run outside the model's forward. Gradients are summed over the ranks, not averaged, because
token weights normalize over all tokens of the optimizer step. A sharded parameter is a `DTensor`; its first dimension
is divided.

Only rank 0 has a whole model, and only until it is divided. The other ranks have the same model without values, on the
meta device (`empty_model`), and get their part of each parameter from rank 0, one parameter at a time.

The same mechanism computes in bfloat16 with weights in float32: FSDP rounds what it gathers. It also stores the weights
on the host. A single rank that needs one of both is a process group of one (`join_alone`).

Collaborators: `ranks` (the division of the work), `forward` (runs the model), `model_files` and `checkpoint` (whole
tensors).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from threading import Lock
from types import MethodType
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from rollmesh.shared.errors import ConfigError, RanksDisagree
from rollmesh.trainer.config import ComputeConfig
from rollmesh.trainer.forward import packed_states
from rollmesh.trainer.model_layers import decoder_layers

_log = logging.getLogger(__name__)
_alone: WeakSet[object] = WeakSet()
"""Trainers of this process that use the process group of one."""
_alone_group: dist.ProcessGroup | None = None
"""The process group of one."""
_alone_lock = Lock()
"""Learners that share a process open their trainers in different threads."""


def join_alone(trainer: object, device: torch.device) -> None:
    """Make the default process group of a single rank, unless another trainer of this process has made it.
    `leave_alone` ends it.

    Raises ConfigError if this process has a process group already, for example because it is one of several ranks."""
    global _alone_group
    with _alone_lock:
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            _alone_group = dist.group.WORLD
        elif dist.group.WORLD is not _alone_group:
            raise ConfigError(
                "`learner.compute.precision` bfloat16 and `learner.compute.offload` on a single rank need a process "
                f"without another process group of torch, and this one has a group of {dist.get_world_size()}; run "
                "each learner in its own process",
                key="learner.compute",
            )
        _alone.add(trainer)


def leave_alone(trainer: object) -> None:
    """End the use of the process group of one by a trainer, and the group with its last user. It has no effect the
    second time."""
    global _alone_group
    with _alone_lock:
        _alone.discard(trainer)
        if not _alone and _alone_group is not None and dist.group.WORLD is _alone_group:
            dist.destroy_process_group()
            _alone_group = None


def empty_model(kind: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of a class of transformers in float32 without values, on the meta device.

    A model whose code reads values when it is made is made on the CPU with random values, which is logged. `shard`
    replaces them.
    """
    make: Any = kind._from_config
    try:
        with torch.device("meta"):
            made: PreTrainedModel = make(copy.deepcopy(config), dtype=torch.float32)
        made.to("meta")  # type: ignore[arg-type]  # what was made from constants
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        _log.warning(
            "this rank makes the model whole, because it cannot be made without values: %s: %s", kind.__name__, error
        )
        made = make(copy.deepcopy(config), dtype=torch.float32)
    return made


def shard(
    model: PreTrainedModel,
    compute: ComputeConfig,
    device: torch.device,
    *,
    to_host: bool = False,
    source: PreTrainedModel | None = None,
) -> None:
    """Divide the weights of a model that rank 0 has on `device` between the ranks of the default process group, in
    place. The model of every other rank gets its values from rank 0. With `source`, a divided model of the same class
    and configuration, every rank copies its part of that instead.

    They stay in their precision, and are rounded to that of `compute` when they are gathered. With `to_host` they are
    stored on the CPU. Raises RanksDisagree if the model of a rank has other tensors than that of rank 0.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    sends = source is None and mesh.size() > 1
    if sends and dist.get_rank() == 0:
        _send(model)
    settings: dict[str, Any] = {"mesh": mesh}
    if compute.precision == "bfloat16":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if to_host:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=model.device.type != "cpu")
    for layer in decoder_layers(model):
        fully_shard(layer, **settings)
    fully_shard(model, reshard_after_forward=False, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule) and mesh.size() > 1:  # a division by 1 would copy the gradients
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # an FSDPModule now
    # The packed forward runs a part of the model, for which the weights must be gathered as for the model's own
    # forward.
    setattr(model, packed_states.__name__, MethodType(packed_states, model))
    register_fsdp_forward_method(model, packed_states.__name__)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu" if to_host else device)
    if source is not None:
        _copy(source, model, device)
    elif sends and dist.get_rank() > 0:
        _receive(model, device)


@torch.no_grad()
def _send(model: PreTrainedModel) -> None:
    """Send every other rank the buffers, and its part of each parameter."""
    constants = {name: tensor.cpu() for name, tensor in _constants(model).items()}
    dist.broadcast_object_list([_shapes(model), constants])
    for parameter in model.parameters():
        rows = _rows_per_rank(parameter.shape[0])
        parts = [_padded(part, rows) for part in torch.split(parameter.detach(), rows)] if rows else []
        empty = parameter.new_zeros((rows, *parameter.shape[1:]))
        parts += [empty] * (dist.get_world_size() - len(parts))
        dist.scatter(torch.empty_like(empty), parts, src=0)


@torch.no_grad()
def _receive(model: PreTrainedModel, device: torch.device) -> None:
    """Fill the divided model of a rank other than 0 with what `_send` sends."""
    found: list[Any] = [None, None]
    dist.broadcast_object_list(found)
    shapes, constants = found
    if shapes != (mine := _shapes(model)) or set(constants) != set(_constants(model)):
        raise RanksDisagree(
            f"the model of rank {dist.get_rank()} has other tensors than that of rank 0: "
            f"{sorted(map(str, {*shapes} ^ {*mine}))[:4] or sorted({*constants} ^ {*_constants(model)})[:4]}; all "
            "ranks must have the same library versions",
            what="the tensors of the model",
        )
    _set_constants(model, constants, device)
    for parameter in model.parameters():
        part = torch.empty(
            (_rows_per_rank(parameter.shape[0]), *parameter.shape[1:]), dtype=parameter.dtype, device=device
        )
        dist.scatter(part, src=0)
        mine_part = local(parameter)
        mine_part.copy_(part[: len(mine_part)])


@torch.no_grad()
def _copy(source: PreTrainedModel, model: PreTrainedModel, device: torch.device) -> None:
    """Fill a divided model with the parts and buffers of another one."""
    _set_constants(model, _constants(source), device)
    for mine, theirs in zip(model.parameters(), source.parameters(), strict=True):
        local(mine).copy_(local(theirs))


def _shapes(model: nn.Module) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(parameter.shape), parameter.dtype) for name, parameter in model.named_parameters()]


def _constants(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers and other tensors of all modules that are not parameters, by module and attribute."""
    return {
        f"{name}:{attribute}": tensor
        for name, module in model.named_modules()
        for attribute, tensor in (*module._buffers.items(), *vars(module).items())
        if isinstance(tensor, Tensor)
    }


def _set_constants(model: nn.Module, constants: dict[str, Tensor], device: torch.device) -> None:
    for key, tensor in constants.items():
        name, _, attribute = key.rpartition(":")
        setattr(model.get_submodule(name), attribute, tensor.to(device, copy=True))


def _rows_per_rank(rows: int) -> int:
    """Return the rows of the first part of a tensor that `fully_shard` divides; later parts may have fewer."""
    return -(-rows // dist.get_world_size())


def _padded(part: Tensor, rows: int) -> Tensor:
    return part if len(part) == rows else torch.cat([part, part.new_zeros((rows - len(part), *part.shape[1:]))])


def release(model: nn.Module) -> None:
    """Release the gathered weights after a forward without backward, because they would not follow the next optimizer
    step."""
    if isinstance(model, FSDPModule):
        model.reshard()


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor with all of its parts. Every rank must call it for a sharded tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parts_on_first(tensor: Tensor) -> list[Tensor]:
    """Return on rank 0 the parts of a tensor along its first dimension, in order, and nothing on the other ranks, which
    hold no whole tensor.

    Every rank must call it for a sharded tensor. A tensor that is not sharded is one part."""
    if not isinstance(tensor, DTensor):
        return [tensor]
    rows, size = _rows_per_rank(tensor.shape[0]), dist.get_world_size()
    part = _padded(tensor.to_local(), rows)
    if size == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(size)] if dist.get_rank() == 0 else None
    dist.gather(part, parts, dst=0)
    return [values[: max(0, tensor.shape[0] - number * rows)] for number, values in enumerate(parts or ())]


def local(tensor: Tensor) -> Tensor:
    """Return the part of the tensor on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class WholeValues(Protocol):
    """A tensor, or a tensor in a file of which rows can be read."""

    def __getitem__(self, rows: slice) -> Tensor: ...


@torch.no_grad()
def assign(target: Tensor, values: WholeValues, shape: Sequence[int]) -> None:
    """Overwrite a tensor, sharded or not, with values of its whole `shape`, which every rank can read. A rank reads its
    part alone.

    Raises ValueError if the tensor has another shape."""
    if tuple(target.shape) != tuple(shape):
        raise ValueError(f"a tensor must have the shape {tuple(target.shape)}, got {tuple(shape)}")
    if not isinstance(target, DTensor):
        target.copy_(values if isinstance(values, Tensor) else values[:])
        return
    part = target.to_local()
    if part.numel():
        first = dist.get_rank() * _rows_per_rank(shape[0])
        part.copy_(values[first : first + len(part)])


def unsharded_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the model's class; `fully_shard` replaces it by a subclass."""
    return next(c for c in type(model).__mro__ if issubclass(c, PreTrainedModel) and not issubclass(c, FSDPModule))


def class_name(model: PreTrainedModel) -> str:
    """Return the name of the model's class."""
    return unsharded_class(model).__name__
