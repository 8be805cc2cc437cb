"""DRPO: raise the likelihood of right answers over that of the wrong ones of their group, short right ones most.

Decoupled Reward Policy Optimization (2025, arXiv:2510.04474). With s_i the mean log-prob per token of sample i, n_i its
trained tokens, and the samples of a group divided by their reward:

    value of a group = sum over right i of w_i * (s_i - tau * log mean over wrong j of exp(s_j / tau))
    w_i              = exp((1 - n_i / length_max) / length_temperature), divided by their sum over the right ones
    loss             = - mean over groups of the values + sg[max(0, beta * (K - delta))] * K
    K                = mean over tokens of exp(d) - 1 - d,   d = log pi - log old

A long right answer has a small weight and is never pushed down. A group with answers of one kind has the value 0. K
estimates KL(old || pi), old being the policy at the start of the update. The coefficient of the penalty rises with the
excess over delta. The samples of a group MUST be in one optimizer step, which `whole_groups` of the rule `minibatches`
ensures. Deviations: an answer is right if its reward is at least `right_min` (the code compares with 1); groups may
have different sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Settings
from rollmesh.trainer.losses.base import CoupledLoss, TokenStats


class DrpoOptions(Settings):
    """Options of DRPO; the defaults are those of the paper."""

    tau: PositiveFloat = 10.0
    """Temperature of the log-mean-exp over wrong answers. Smaller: the most likely wrong answer decides."""
    length_temperature: PositiveFloat = 0.1
    """lambda: temperature of the preference for short right answers. Larger: less preference."""
    length_max: PositiveInt = 1024
    """Longest possible response, in tokens."""
    beta: NonNegativeFloat = 1000.0
    """Slope of the coefficient of the penalty."""
    delta: NonNegativeFloat = 1e-4
    """Divergence, in nats per token, up to which there is no penalty."""
    right_min: float = 0.5
    """Least reward of a right answer."""


class Drpo(CoupledLoss):
    """The loss with its options."""

    name = "drpo"
    whole_groups = True
    needs = ("current", "proximal")
    needs_behavior = False
    Options: ClassVar[type[Settings]] = DrpoOptions

    def __init__(self, *, options: DrpoOptions) -> None:
        self.options = options

    def value(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, TokenStats]:
        """Return the loss, and per token `divergence`, the estimate of the KL divergence."""
        options = self.options
        number = columns["sample"]
        begins = torch.cat([number.new_ones(1, dtype=torch.bool), number[1:] != number[:-1]])
        sample, first = begins.cumsum(0) - 1, begins.nonzero().squeeze(-1)
        zeros = logprobs.new_zeros(len(first))
        length = zeros.index_add(0, sample, torch.ones_like(logprobs))
        score = zeros.index_add(0, sample, logprobs) / length
        right = columns["reward"][first] >= options.right_min
        group = columns["group"][first]
        preference = (1 - length / options.length_max) / options.length_temperature
        groups = sorted(set(group.tolist()))
        gain = logprobs.new_zeros(())
        for each in groups:
            good, bad = (group == each) & right, (group == each) & ~right
            if good.any() and bad.any():
                against = options.tau * ((score[bad] / options.tau).logsumexp(0) - bad.sum().to(score.dtype).log())
                gain = gain + (preference[good].softmax(0) * (score[good] - against)).sum()
        ratio = logprobs - columns["proximal"]
        divergence = ratio.expm1() - ratio
        mean = divergence.mean()
        penalty = (options.beta * (mean - options.delta)).clamp(min=0).detach() * mean
        return penalty - gain / len(groups), {"divergence": divergence.detach()}
