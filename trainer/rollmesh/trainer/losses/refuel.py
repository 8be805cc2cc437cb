"""Regress the difference of two returns on that of two log-ratios (REFUEL, 2024-10, arXiv:2410.04612; code:
ZhaolinGao/REFUEL).

For the two samples of an episode that share a prefix, with y and y' their trained tokens and R and R' their rewards:

    loss = mean over pairs of ( (1 / eta) [ log pi(y) / prox(y) - log pi(y') / prox(y') ] - (R - R') )^2

log pi(y) is the sum over the trained tokens, and prox the policy before the update. The minimum is the policy
prox exp(eta Q) / Z, if R is a return without noise; with noise of variance s^2 the loss falls to 2 s^2. Neither a
critic nor an advantage is needed, so the estimator is `none`. An episode with another number of samples in the
optimizer step has no pair and no loss. The loss of the code is eta^2 times this one. The samples of a group MUST be in
one optimizer step, which `whole_groups` of the rule `minibatches` ensures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rollmesh.shared.config.settings import PositiveFloat, Settings
from rollmesh.trainer.losses.base import CoupledLoss, TokenStats


class RefuelOptions(Settings):
    """Options of the term."""

    eta: PositiveFloat = 1.0
    """Log-ratio per unit of reward. Larger: the policy moves further. The code has 1000 for rewards of a model whose
    differences are small."""


class Refuel(CoupledLoss):
    """The loss with its options."""

    name = "refuel"
    whole_groups = True
    needs = ("current", "proximal")
    needs_behavior = False
    Options: ClassVar[type[Settings]] = RefuelOptions

    def __init__(self, *, options: RefuelOptions) -> None:
        self.options = options

    def value(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, TokenStats]:
        """Return the loss, and per token `squared_error` of its pair, 0 without a pair."""
        _, sample = torch.unique(columns["sample"], return_inverse=True)
        num = int(sample.max()) + 1
        ratio = logprobs.new_zeros(num).index_add(0, sample, logprobs - columns["proximal"])
        reward = logprobs.new_zeros(num).scatter(0, sample, columns["reward"].to(logprobs.dtype))
        episode = columns["episode"].new_zeros(num).scatter(0, sample, columns["episode"])
        _, pair, counts = torch.unique(episode, return_inverse=True, return_counts=True)
        order = torch.argsort(pair, stable=True)
        of_pairs = order[counts[pair[order]] == 2].reshape(-1, 2)
        first, second = of_pairs.unbind(1)
        error = (ratio[first] - ratio[second]) / self.options.eta - (reward[first] - reward[second])
        squared = logprobs.new_zeros(num).index_copy(0, of_pairs.flatten(), error.square().repeat_interleave(2))
        loss = error.square().mean() if len(error) else logprobs.sum() * 0.0
        return loss, {"squared_error": squared.detach()[sample]}
