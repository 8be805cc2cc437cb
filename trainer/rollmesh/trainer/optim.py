"""AdamW, its learning-rate schedule, and the guarded step.

The learning rate is a function of the update number alone, so there is no scheduler state to save.
A step with a non-finite gradient is not taken, and parameters and moments stay bit for bit the same.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import nn


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101) with linear warm-up and linear decay over updates."""

    lr: float = 1e-6
    """Peak learning rate. The default suits models of about 0.5 to 10 billion parameters; smaller models need more (the demo's, of
    0.36 million, trains at 7e-4)."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled decay of matrices; vectors (norms, biases) are never decayed."""
    clip_norm: float = 1.0
    """Largest global gradient norm; longer gradients are scaled down to it."""
    warmup_updates: int = 3
    """Updates until `lr` is reached, linearly from lr / warmup_updates."""
    decay_updates: int = 0
    """Updates after which the rate is `lr * final_fraction`, and stays; 0 keeps it constant."""
    final_fraction: float = 0.05

    def __post_init__(self) -> None:
        for name in ("lr", "epsilon", "clip_norm"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} = {getattr(self, name)}: must be positive")
        for name in ("weight_decay", "warmup_updates", "decay_updates"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must not be negative")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas = {self.betas}: each must be in [0, 1)")
        if not 0 <= self.final_fraction <= 1:
            raise ValueError(f"final_fraction = {self.final_fraction}: must be in [0, 1]")


def lr_at(config: OptimizerConfig, update: int) -> float:
    """Return the learning rate of update `update` (1, 2, ...)."""
    warm = min(1.0, update / config.warmup_updates) if config.warmup_updates else 1.0
    done = min(1.0, (update - 1) / config.decay_updates) if config.decay_updates else 0.0
    return config.lr * warm * (1.0 - (1.0 - config.final_fraction) * done)


def make_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters: matrices with decay, vectors without. The fused kernel also runs on the CPU."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.epsilon, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def guarded_step(*optimizers: torch.optim.Optimizer, clip_norm: float, loss: float) -> float | None:
    """Clip, step and clear gradients. Several optimizers share one norm and step together or not at all.

    Return the norm before clipping, or None if loss or norm is not finite; nothing is changed then.
    """
    parameters = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, clip_norm))
    finite = math.isfinite(norm) and math.isfinite(loss)
    for optimizer in optimizers:
        if finite:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return norm if finite else None
