"""The loss protocol: what a policy-gradient loss sees, and how token losses are summed.

A loss is a pure function of tensors and a frozen config. It sums `token_weight * loss of the token`; all normalisation
is in `token_weight`, computed once per optimiser step over all of its tokens. That is why gradients accumulated over
micro-batches equal those of one big batch, whatever the split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor

TokenStats = Mapping[str, Tensor]
"""Name -> detached [m] per-token numbers, to be averaged or grouped by `metrics`."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Trained tokens, all [m]. Log-probs are natural, at the sampling temperature.

    `logprobs` (pi) carries the gradient. `behaviour` (mu) is what the engine sampled under. `proximal` is the policy
    before the update's first optimiser step, given to losses that ask for it.
    """

    logprobs: Tensor
    behaviour: Tensor
    advantages: Tensor
    token_weight: Tensor
    proximal: Tensor | None = None


class PolicyLoss(Protocol):
    """A loss with its config bound."""

    @property
    def needs_proximal(self) -> bool:
        """Whether `LossInputs.proximal` must be given: costs one more forward over the batch."""
        ...

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """(scalar to add to the step's loss, per-token statistics)."""
        ...


class Normalisation(Enum):
    """What one optimiser step averages over."""

    TOKEN = "token"
    """Every trained token counts alike: 1 / tokens of the step (DAPO, arXiv:2503.14476). Long samples weigh more."""
    SEQUENCE_MEAN = "sequence_mean"
    """Every sample counts alike: 1 / (samples x its tokens), as in GRPO. Favours brevity when right, length when wrong."""


def token_weights(lengths: Sequence[int], sample_weights: Sequence[float], normalisation: Normalisation) -> Tensor:
    """Weights [sum of lengths] of the tokens of one optimiser step; `lengths` are trained tokens per sample, all > 0.

    Sample weights scale the numerator only: a sample of weight 0.5 pulls half as hard.
    """
    counts = torch.tensor(lengths, dtype=torch.float64)
    if normalisation is Normalisation.TOKEN:
        per_sample = torch.ones_like(counts) / counts.sum()
    else:
        per_sample = 1.0 / (len(lengths) * counts)
    per_sample = per_sample * torch.tensor(sample_weights, dtype=torch.float64)
    return per_sample.repeat_interleave(torch.tensor(lengths)).float()
