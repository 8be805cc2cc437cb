"""AdamW, its learning-rate schedule, and the guarded step.

The learning rate is a function of the update number alone, so there is no scheduler state to save.
A step with a non-finite gradient is not taken, and parameters and moments stay bit for bit the same.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from rollmesh.trainer.config import OptimizerConfig


def lr_at(config: OptimizerConfig, update: int) -> float:
    """Return the learning rate of update `update` (1, 2, ...)."""
    warm = min(1.0, update / config.warmup_updates) if config.warmup_updates else 1.0
    done = min(1.0, (update - 1) / config.decay_updates) if config.decay_updates else 0.0
    return config.lr * warm * (1.0 - (1.0 - config.final_fraction) * done)


def make_adamw(model: nn.Module, config: OptimizerConfig, modules: nn.Module | None = None) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters: matrices with decay, vectors without. The fused kernel also runs on the CPU.

    `modules` are those of loss terms, which have parameter groups with `modules` True.
    """
    groups = []
    for part, is_module in ((model, False), (modules, True)):
        trainable = [p for p in part.parameters() if p.requires_grad] if part is not None else []
        matrices, vectors = [p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2]
        groups.append({"params": matrices, "weight_decay": config.weight_decay, "modules": is_module})
        groups.append({"params": vectors, "weight_decay": 0.0, "modules": is_module})
    groups = [g for g in groups if g["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float, modules_factor: float = 1.0) -> None:
    """Set the learning rate, multiplied by `modules_factor` for modules of loss terms."""
    for group in optimizer.param_groups:
        group["lr"] = lr * modules_factor if group.get("modules") else lr


def guarded_step(*optimizers: torch.optim.Optimizer, clip_norm: float, loss: float) -> float | None:
    """Clip, step and clear gradients. Several optimizers share one norm and step together or not at all.

    Modules of loss terms have a separate norm, so that the large gradients of a new head do not shrink the step of the policy.
    Return the norm of the policy before clipping, or None if the loss or a norm is not finite; nothing is changed then.
    """
    groups = [g for o in optimizers for g in o.param_groups]
    norms = []
    for modules in (False, True):
        parameters = [p for g in groups if g.get("modules", False) == modules for p in g["params"]]
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, clip_norm)))
    finite = all(math.isfinite(value) for value in (*norms, loss))
    for optimizer in optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norms[0] if finite else None
