"""Muon for the warm start: orthogonalized momentum, in float32 and batched by shape.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon): for a weight matrix with gradient G,

    M <- beta M + G,   U = G + beta M (Nesterov),   W <- W - lr * sqrt(max(1, rows / cols)) * NS5(U)

NS5 is five Newton-Schulz steps X <- a X + (b A + c A^2) X with A = X X^T, which move all singular values of U / |U|
towards 1.

With AdamW, the induction phase transition of the tiny model depends on the seed: 1000 and more steps for some seeds,
none for others. With Muon it comes within 170-300 steps for every seed tried. `torch.optim.Muon` is not used, because
its bf16 Newton-Schulz is slow on CPUs without bf16 units (70 ms per step instead of 25 ms). This one processes matrices
of one shape as one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5


class Muon(torch.optim.Optimizer):
    """Muon for 2-D parameters. Embeddings, output layers and vectors use AdamW."""

    def __init__(self, params: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95) -> None:
        params = list(params)
        wrong = [tuple(p.shape) for p in params if p.ndim != 2]
        if wrong:
            raise ValueError(f"parameters of Muon must be matrices, got the shapes {wrong}")
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("Muon does not support a closure")
        for group in self.param_groups:
            for params in _by_shape(p for p in group["params"] if p.grad is not None):
                rows, cols = params[0].shape
                updates = orthogonalize(torch.stack([self._nesterov(p, group["momentum"]) for p in params]))
                scale = group["lr"] * max(1.0, rows / cols) ** 0.5
                for parameter, update in zip(params, updates, strict=True):
                    parameter.add_(update, alpha=-scale)

    def _nesterov(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None
        buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(gradient))
        buffer.mul_(momentum).add_(gradient)
        return gradient.add(buffer, alpha=momentum)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximate U V^T of each matrix in [batch, rows, cols]. The singular values of the result are between about 0.7
    and 1.2."""
    a, b, c = NS_COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices  # so that the Gram matrix is the smaller one
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x.transpose(1, 2) if tall else x
    return result


def _by_shape(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in params:
        groups.setdefault(tuple(parameter.shape), []).append(parameter)
    return list(groups.values())
