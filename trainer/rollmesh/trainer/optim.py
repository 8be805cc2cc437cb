"""AdamW, its parameter groups, its learning-rate schedule, and the guarded step.

The learning rate is a function of the update number alone, so there is no scheduler state to save. A step with a
non-finite gradient is not taken, and parameters and moments stay bit for bit the same. Each group has the names of its
parameters (`param_names`), by which a checkpoint finds the moments if the groups have changed.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.config import OptimizerConfig
from rollmesh.trainer.sharding import whole

_KEY = "learner.optimizer"


def lr_at(config: OptimizerConfig, update: int) -> float:
    """Return the learning rate of update `update` (1, 2, ...)."""
    warm = min(1.0, update / config.warmup_updates) if config.warmup_updates else 1.0
    done = min(1.0, (update - 1) / config.decay_updates) if config.decay_updates else 0.0
    if config.decay == "cosine":
        done = (1.0 - math.cos(math.pi * done)) / 2.0
    return config.lr * warm * (1.0 - (1.0 - config.final_fraction) * done)


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, modules: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Return AdamW over the trainable parameters: matrices with decay, vectors without, and `config.groups`.

    `modules` are those of loss terms, which have parameter groups with `modules` True. The fused kernel also runs on
    the CPU. Raises ConfigError for a group that matches no trainable parameter, and for a package that is not
    installed.
    """
    groups: list[dict[str, Any]] = []
    for part, factor, is_module in ((model, 1.0, False), (modules, config.modules_factor, True)):
        named = [(n, p) for n, p in part.named_parameters() if p.requires_grad] if part is not None else []
        for number, group in enumerate(config.groups if not is_module else ()):
            chosen = [(n, p) for n, p in named if fnmatchcase(n, group.names)]
            if not chosen:
                raise ConfigError(
                    f"`{_KEY}.groups[{number}].names`: no trainable parameter matches {group.names!r} that an earlier "
                    "group does "
                    f"not have; the model has, for example, {', '.join(n for n, _ in named[:3]) or 'none left'}",
                    key=f"{_KEY}.groups",
                )
            names = {n for n, _ in chosen}
            named = [(n, p) for n, p in named if n not in names]
            groups += _split(chosen, config, group.weight_decay, lr_factor=group.lr_factor, modules=False)
        groups += _split(named, config, None, lr_factor=factor, modules=is_module)
    if config.kind == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True)
    try:
        from torchao.optim import AdamW8bit
    except ModuleNotFoundError as err:
        raise ConfigError(
            f"`{_KEY}.kind`: adamw_8bit requires the package torchao: pip install torchao", key=f"{_KEY}.kind"
        ) from err
    optimizer: torch.optim.Optimizer = AdamW8bit(groups, lr=config.lr, betas=config.betas, eps=config.epsilon)
    return optimizer


def _split(
    named: list[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    decay: float | None,
    *,
    lr_factor: float,
    modules: bool,
) -> list[dict[str, Any]]:
    """Return a group for the matrices and one for the vectors, each if it has parameters."""
    matrices, vectors = [(n, p) for n, p in named if p.ndim >= 2], [(n, p) for n, p in named if p.ndim < 2]
    decays = (config.weight_decay, 0.0) if decay is None else (decay, decay)
    return [
        {"params": part, "weight_decay": of_part, "lr_factor": lr_factor, "modules": modules}
        for part, of_part in zip((matrices, vectors), decays, strict=True)
        if part
    ]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate, multiplied by the factor of each group. Raises ValueError for a rate that would ruin the
    weights."""
    if not (math.isfinite(lr) and lr >= 0):
        raise ValueError(f"the learning rate must be finite and >= 0, got {lr}")
    for group in optimizer.param_groups:
        value = lr * group.get("lr_factor", 1.0)
        if isinstance(group["lr"], Tensor):  # a compiled optimizer reads the rate from a tensor
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def guarded_step(*optimizers: torch.optim.Optimizer, clip_norm: float, loss: float) -> float | None:
    """Clip, step and clear gradients. Several optimizers share one norm and step together or not at all.

    Modules of loss terms have a separate norm, so that the large gradients of a new head do not shrink the step of the
    policy. Return the norm of the policy before clipping, or None if the loss or a norm is not finite; nothing is
    changed then.
    """
    groups = [g for o in optimizers for g in o.param_groups]
    norms = []
    for modules in (False, True):
        parameters = [p for g in groups if g.get("modules", False) == modules for p in g["params"]]
        norms.append(float(whole(torch.nn.utils.clip_grad_norm_(parameters, clip_norm))))
    finite = all(math.isfinite(value) for value in (*norms, loss))
    for optimizer in optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norms[0] if finite else None
