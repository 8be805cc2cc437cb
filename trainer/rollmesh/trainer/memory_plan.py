"""Plan the memory of a trainer before its model is loaded: run an optimizer step on tensors without storage, and count
what would live.

The layers, the output layer and their backward run under torch's FakeTensorMode, which computes shapes but no values,
on the largest micro-batch that the settings allow, with every token trained. A dispatch mode counts the bytes of the
tensors that live. So the plan holds for any architecture, and needs neither the weights nor the device. It does not see
what kernels allocate inside, nor the memory of the process itself (Python and libraries, about 0.4 GiB; on a GPU the
context, about 0.5 GiB).

The plan is for one device. Several ranks divide weights, gradients, optimizer state and reference between them
(`sharding`). Then the whole weights and gradients that a rank gathers at a time are added by formula: those outside the
layers, those of two layers, and the buffers in float32 in which the gradients of one layer are summed. The same holds
for the rounded copies of a trainer in bfloat16, and for weights that are stored on the host. Only rank 0 loads whole
models, one after another, and the plan is that of rank 0. A single rank that divides its models or stores them on the
host holds policy and reference whole at once.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from rollmesh.shared.config.plugin import overrides
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer import forward
from rollmesh.trainer.config import LoraSettings, UpdateConfig
from rollmesh.trainer.feature_pass import forward_features
from rollmesh.trainer.features import FeatureRequest
from rollmesh.trainer.forward import ForwardMode, ForwardPlan
from rollmesh.trainer.lora import inject
from rollmesh.trainer.losses import LossTerm
from rollmesh.trainer.model_config import auto_class, freeze_other_parts
from rollmesh.trainer.model_layers import checkpoint_layers, decoder_layers
from rollmesh.trainer.packing import MicroBatch
from rollmesh.trainer.plugins import Plugins
from rollmesh.trainer.vocabulary_features import Entropy

_log = logging.getLogger(__name__)
_MOMENTS_BYTES = {"adamw": 8, "adamw_8bit": 2}
"""Optimizer state per parameter, in bytes."""
_OFFLOADED: dict[str, tuple[str, ...]] = {
    "none": (),
    "reference": ("reference",),
    "optimizer": ("reference", "weights", "gradients", "optimizer"),
}
"""Parts of the plan that `compute.offload` stores on the host."""
_GIB = 1 << 30
_SMALL = 64
"""A model whose weights are below this part of the memory of the device is not planned at start."""


class NoMemoryPlan(Exception):
    """The memory of this model cannot be planned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Peak memory of an update on one device, in bytes, by what needs it."""

    weights: int
    """Weights of the policy in float32, and buffers."""
    gradients: int
    optimizer: int
    reference: int
    """Weights of the reference model; 0 without one, and for the base of adapters."""
    copied: int = 0
    """Copy of weights and optimizer state for a checkpoint that is written beside the next update, on a CPU."""
    gathered: int = 0
    """Whole weights and gradients, in the precision of the computation, that exist for a time beside the stored
    ones."""
    loading: int = 0
    """Whole weights before they are divided between ranks or moved to the host: on a single rank of policy and
    reference; on rank 0 of several those of the policy, or its part of the policy and the whole reference. Nothing else
    exists then."""
    reading: int = 0
    """Whole weights of one model in the memory of the host, from which they are moved to the device; 0 if the device is
    the CPU. Only rank 0 needs it. `total` does not contain it."""
    host: int = 0
    """What `compute.offload` stores in the memory of the host, which `total` does not contain."""
    activations: int
    """What the layers keep from the forward to the backward of the largest micro-batch."""
    logits: int
    """Logits of one part of the micro-batch and their gradient, and temporary tensors of the backward."""
    rows: int
    """Rows of the largest micro-batch."""
    row_tokens: int
    """Length of its rows, in tokens."""

    @property
    def training(self) -> int:
        """Peak of an update, on every rank."""
        held = self.weights + self.gradients + self.optimizer + self.reference + self.copied + self.gathered
        return held + self.activations + self.logits

    @property
    def total(self) -> int:
        """Peak of rank 0."""
        return max(self.training, self.loading)

    def __str__(self) -> str:
        """Return the plan on one line."""
        parts = ("weights", "gradients", "optimizer", "reference", "copied", "gathered", "activations", "logits")
        shares = ", ".join(f"{name} {_size(getattr(self, name))}" for name in parts if getattr(self, name))
        if self.loading == self.total:
            shares = f"loading {_size(self.loading)}; {shares}"
        host = f", and {_size(self.host)} on the host" if self.host else ""
        host += f", and {_size(self.reading)} there while rank 0 loads a model" if self.reading else ""
        return f"{_size(self.total)} for micro-batches of {self.rows} x {self.row_tokens} tokens ({shares}){host}"


def plan_memory(
    config: UpdateConfig,
    model_config: PretrainedConfig,
    plugins: Plugins,
    *,
    longest: int = 0,
    ranks: int = 1,
    mode: ForwardMode = ForwardMode.PACKED,
    reference_config: PretrainedConfig | None = None,
    copies: bool = False,
    device: str = "cpu",
) -> MemoryPlan:
    """Return the plan for a model of `model_config`.

    `longest` is the length of the longest sequence in tokens, which runs alone if it exceeds
    `packing.micro_batch_tokens`. `reference_config` is the configuration of a reference model of another size. The plan
    is that of one of `ranks` ranks. `copies` states that checkpoints are copied into the memory of the device. On the
    `device` cpu, what `compute.offload` stores on the host is stored on the device.

    Raises NoMemoryPlan for a model whose code reads the values of tensors, such as the choice of experts.
    """
    shapes = {_largest_shape(config, mode, longest=0), _largest_shape(config, mode, longest=longest)}
    if shared := config.packing.shared_row_tokens:
        shapes.add((config.packing.micro_batch_tokens // shared, shared))
    try:
        plans = [_planned(config, model_config, plugins, shape, mode, reference_config, ranks) for shape in shapes]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
        raise NoMemoryPlan(
            f"the forward of model_type `{model_config.model_type}` cannot be run without values: "
            f"{type(error).__name__}: {error}"
        ) from error
    plan = max(plans, key=_total)
    if copies:
        plan = replace(plan, copied=plan.weights + plan.optimizer)
    if torch.device(device).type == "cpu":
        return replace(plan, reading=0)
    moved = _OFFLOADED[config.compute.offload]
    host = sum(getattr(plan, name) for name in moved)
    return replace(plan, host=host, **dict.fromkeys(moved, 0))


def plan_folder(
    config: UpdateConfig,
    folder: Path,
    plugins: Plugins,
    *,
    longest: int = 0,
    ranks: int = 1,
    copies: bool = False,
    device: str = "cpu",
) -> MemoryPlan:
    """Return the plan for the model in a folder, see `plan_memory`. Raises ValueError if transformers cannot read the
    folder."""
    try:
        model_config, other = AutoConfig.from_pretrained(folder), None
        if config.reference.kind == "path" and plugins.under("reference"):
            other = AutoConfig.from_pretrained(config.reference.path)
        return plan_memory(
            config,
            model_config,
            plugins,
            longest=longest,
            ranks=ranks,
            reference_config=other,
            copies=copies,
            device=device,
        )
    except (OSError, KeyError) as error:
        raise ValueError(f"no model can be loaded from {folder}: {error}") from error


def is_small(folder: Path, device: str) -> bool:
    """Return whether the weights of a model folder are so small for the device that a plan at start, which takes
    seconds, is omitted."""
    num_bytes = sum(file.stat().st_size for file in (*folder.glob("*.safetensors"), *folder.glob("*.bin")))
    return num_bytes * _SMALL < device_bytes(device)


def plan_start(
    config: UpdateConfig,
    folder: Path,
    device: str,
    plugins: Plugins,
    *,
    longest: int = 0,
    ranks: int = 1,
    copies: bool = False,
) -> MemoryPlan | None:
    """Log the plan of a trainer that is about to load the model of a folder; None, if it is small or has no plan, which
    is logged.

    Raises ConfigError if the device has less memory, and ValueError if transformers cannot read the folder.
    """
    if is_small(folder, device):
        return None
    try:
        plan = plan_folder(config, folder, plugins, longest=longest, ranks=ranks, copies=copies, device=device)
    except NoMemoryPlan as error:
        _log.warning("no memory plan, so the memory of the device is not checked: %s", error)
        return None
    _log.info("memory plan: %s", plan)
    check_memory(plan, device, config)
    return plan


def check_memory(plan: MemoryPlan, device: str, config: UpdateConfig) -> None:
    """Raise ConfigError that names the remedies if the device has less memory for each of its ranks than the plan
    needs."""
    has, each, needed = device_bytes(device), "", plan.total
    if torch.device(device).type == "cpu" and (ranks := config.compute.ranks) > 1:  # they share the memory of the host
        has, each = has // ranks, " for each rank"
        needed = max(plan.training, (plan.loading + (ranks - 1) * (plan.weights + plan.reference)) // ranks)
    of_host = device_bytes("cpu") // config.compute.ranks
    if plan.host > of_host:
        raise ConfigError(
            f"`learner.compute.offload` {config.compute.offload} needs {_size(plan.host)} of the host for each rank, "
            f"and the host has {_size(of_host)}; set it to none, or choose a smaller model or a host with more memory",
            key="learner.compute.offload",
        )
    if plan.reading > device_bytes("cpu"):
        raise ConfigError(
            f"`learner.model` needs {_size(plan.reading)} of the host while rank 0 loads it, and the host has "
            f"{_size(device_bytes('cpu'))}; choose a smaller model or a host with more memory",
            key="learner.model",
        )
    if needed <= has:
        return
    compute, remedies = config.compute, []
    can_shard = not config.lora.rank and config.optimizer.kind == "adamw"
    if can_shard and compute.precision == "float32":
        remedies.append("set learner.compute.precision to bfloat16")
    if can_shard and compute.offload != "optimizer" and torch.device(device).type != "cpu":
        remedies.append("set learner.compute.offload to optimizer")
    if not compute.gradient_checkpointing:
        remedies.append("set learner.compute.gradient_checkpointing to true")
    if not 0 < compute.logprob_chunk_tokens <= 512:
        remedies.append("set learner.compute.logprob_chunk_tokens to 512 or less")
    if plan.activations + plan.logits > plan.total // 8:
        keys = "row_tokens and shared_row_tokens" if config.packing.shared_row_tokens else "row_tokens"
        remedies.append(f"lower learner.packing.micro_batch_tokens and {keys}, or the longest sequence")
    remedies.append("choose a smaller model or a device with more memory")
    raise ConfigError(
        f"`learner.compute`: training needs {plan}, and the device {device} has {_size(has)}{each}; "
        f"{', '.join(remedies)}",
        key="learner.compute",
    )


def device_bytes(device: str) -> int:
    """Return the memory of a torch device, in bytes; for the CPU that of the host."""
    chosen = torch.device(device)
    if chosen.type == "cuda":
        return int(torch.cuda.get_device_properties(chosen).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _planned(
    config: UpdateConfig,
    model_config: PretrainedConfig,
    plugins: Plugins,
    shape: tuple[int, int],
    mode: ForwardMode,
    reference_config: PretrainedConfig | None,
    ranks: int,
) -> MemoryPlan:
    rows, row_tokens = shape
    compute, dtype = config.compute, torch.bfloat16 if config.compute.precision == "bfloat16" else torch.float32
    chosen = ForwardPlan(mode, config.packing, config.compute.logprob_chunk_tokens)
    make_model = _maker(model_config, config.lora, dtype)
    make_reference = _maker(reference_config or model_config, LoraSettings(), torch.float32)
    with FakeTensorMode(), _Living() as living:
        model = make_model()
        weights = living.bytes
        parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
        divides = ranks > 1 or compute.shards
        if config.compute.gradient_checkpointing:
            checkpoint_layers(model)
        batch = _whole_batch(rows, row_tokens, masked=row_tokens <= config.packing.shared_row_tokens)
        before = living.bytes
        outputs = forward.target_outputs(model, batch, mode, hidden=bool(_modules(plugins)))
        activations = living.bytes - before
        del outputs
        others = _others(plugins) * activations
        for _ in range(2):  # the gradients of the first exist during the second
            _forward_and_backward(model, batch, plugins, config, chosen)
        gradients = living.bytes - before
        logits = max(0, living.most - weights - gradients - activations)
        gathered = _gathered_bytes(model, ranks, activations + logits) if divides else 0
        reference = 0
        if plugins.under("reference") and not (config.lora.rank and config.reference.kind == "initial"):
            before = living.bytes
            _other_model = make_reference()
            reference = living.bytes - before
            if compute.offload != "none" and not divides:
                gathered = sum(_unit_bytes(_other_model))
    stored = 4 // dtype.itemsize  # weights and their gradients are stored in float32, and computed with in `dtype`
    policy, loaded = stored * weights, 0 if config.reference.kind == "average" else reference
    loading = policy + reference if divides or compute.offload != "none" else 0
    if ranks > 1:
        loading = max(policy, policy // ranks + loaded)
    return MemoryPlan(
        weights=stored * weights // ranks,
        gradients=stored * gradients // ranks,
        optimizer=parameters * _MOMENTS_BYTES[config.optimizer.kind] // ranks,
        reference=reference // ranks,
        gathered=gathered,
        loading=loading,
        reading=max(policy, loaded),
        activations=activations + others,
        logits=logits,
        rows=rows,
        row_tokens=row_tokens,
    )


def _forward_and_backward(
    model: PreTrainedModel, batch: MicroBatch, plugins: Plugins, config: UpdateConfig, plan: ForwardPlan
) -> None:
    """Make what `BatchTrainer` does with a micro-batch, with a sum in place of the loss.

    A feature that reads more than the row of a token depends on values, which do not exist here, and is omitted.
    """
    requests = {r.key: r for r in plugins.under("current").values() if r.feature.by_token or r.feature.reads_router}
    if config.report_entropy:
        request = FeatureRequest(Entropy(), "current")
        requests[request.key] = request
    inputs, features = forward_features(model, batch, {}, plan, list(requests.values()), hidden=bool(_modules(plugins)))
    values = [inputs.logprobs, *(value for value in features.values() if value.requires_grad)]
    torch.stack([value.sum() for value in values]).sum().backward()  # type: ignore[no-untyped-call]


def _unit_bytes(model: PreTrainedModel) -> tuple[int, int]:
    """Return the bytes of the parameters outside the layers, and of two layers."""
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in decoder_layers(model)]
    return sum(p.nbytes for p in model.parameters()) - sum(layers), 2 * max(layers)


def _gathered_bytes(model: PreTrainedModel, ranks: int, others: int) -> int:
    """Return what `sharding` needs for whole weights and gradients beside `others`, the bytes of activations and
    logits.

    The gradients of a unit are copied to a buffer in float32, of which each rank gets its part of the sum. This happens
    layer by layer, and for the parameters outside the layers at the end of the backward, when these, activations and
    logits have been freed."""
    outside, two_layers = _unit_bytes(model)

    def summed(unit: int) -> int:
        exact = unit * 4 // next(model.parameters()).itemsize
        return exact + max(unit, exact // ranks)

    in_layers = 2 * outside + two_layers + summed(two_layers // 2)
    return max(in_layers, summed(outside) - others)


def _modules(plugins: Plugins) -> list[str]:
    return [name for name, term in plugins.loss.terms.items() if overrides(term, LossTerm.make_module)]


def _others(plugins: Plugins) -> int:
    """Return how many forwards of other sequences are kept for the backward of a micro-batch."""
    return len({r.key for r in plugins.under("current").values() if r.grad and r.reads_others})


def _largest_shape(config: UpdateConfig, mode: ForwardMode, *, longest: int) -> tuple[int, int]:
    """Return rows x row length of the largest micro-batch."""
    packing = config.packing
    if mode is ForwardMode.UNPACKED:
        return 1, longest or packing.row_tokens
    width = max(packing.row_tokens, longest)
    return max(1, packing.micro_batch_tokens // width), width


def _whole_batch(rows: int, row_tokens: int, *, masked: bool) -> MicroBatch:
    """Return a micro-batch of one sequence per row, in which every token except the first of a row is wanted. `masked`:
    it has the mask of rows with shared prefixes."""
    count = rows * (row_tokens - 1)
    places = torch.zeros(count, dtype=torch.long)
    return MicroBatch(
        token_ids=torch.zeros(rows, row_tokens, dtype=torch.long),
        position_ids=torch.zeros(rows, row_tokens, dtype=torch.long),
        target_row=places,
        target_col=places.clone(),
        target_next=places.clone(),
        target_index=places.clone(),
        num_tokens=rows * row_tokens,
        sequences=tuple(range(rows)),
        parts=torch.zeros(2, rows, row_tokens, dtype=torch.long) if masked else None,
    )


def _empty_model(model_config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = auto_class(model_config).from_config(model_config, dtype=dtype).train(False)
    freeze_other_parts(model)
    return model


def _maker(model_config: PretrainedConfig, lora: LoraSettings, dtype: torch.dtype) -> Callable[[], PreTrainedModel]:
    """Return a function that makes the empty model, with adapters if there are any, under FakeTensorMode.

    Adapters and vision towers are made on the meta device before, because peft moves layers and the towers read values
    when they are initialized, which tensors of FakeTensorMode do not support."""
    if not lora.rank and model_config.get_text_config(decoder=True) is model_config:
        return partial(_empty_model, model_config, dtype)
    with torch.device("meta"):
        model = _empty_model(model_config, dtype)
        if lora.rank:
            inject(model, lora)
    return partial(_on_cpu, model)


def _on_cpu(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the tensors of a model, in place, by empty ones on the CPU."""
    for module in model.modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(module, name, nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty)
    model.tie_weights()
    return model


def _total(plan: MemoryPlan) -> int:
    return plan.total


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / (1 << 20):.1f} MiB"


class _Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the storages of tensors that operations make, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0
        self.most: int = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of_device = func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor)
        if of_device and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device  # the most frequent call, which makes no tensor
        made = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._add, made)
        self.most = max(self.most, self.bytes)
        return made

    def _add(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self.bytes += size

            def freed(_: object) -> None:
                self.bytes -= size
                del self._known[key]

            self._known[key] = weakref.ref(storage, freed)
        return tensor
