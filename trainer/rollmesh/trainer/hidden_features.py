"""Built-in features of the last hidden states: effective rank along a response, and its projected mean.

A row of the states of a sample is the state from which one of its trained tokens is predicted. No feature here has a
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from rollmesh.shared.config.settings import NonNegativeInt, PositiveInt, Settings
from rollmesh.trainer.features import Feature, FeatureInputs


class EffectiveRankOptions(Settings):
    """Options of `effective_rank`."""

    stride: PositiveInt = 40
    """Trained tokens between two prefixes."""


class EffectiveRank(Feature):
    """Effective rank (Roy & Vetterli 2007) of the states of a sample, of its prefixes, and the changes between them,
    [m, 4].

    For a matrix with the singular values s_i after each column was centered, ER = exp(- sum p_i log p_i) with p_i = s_i
    / sum s. It is between 1 and the number of dimensions; 1 if all rows are equal. ER_k is that of the first k * stride
    rows. The columns are

        0   ER of all rows of the sample, the same at all of its tokens
        1   ER_k for the k-th stride of tokens
        2   velocity,      ER_k - mean of ER_1 .. ER_(k-1);   0 for k = 1
        3   acceleration,  velocity_k - velocity_(k-1);       0 for k < 3

    Tokens after the last whole stride have its values. For a sample shorter than one stride, column 1 is column 0, and
    2 and 3 are 0. Costs an eigenvalue decomposition in float64 per stride, of min(rows, dimensions) squared.
    """

    Options: ClassVar[type[Settings]] = EffectiveRankOptions
    reads_hidden = True

    def __init__(self, *, options: EffectiveRankOptions) -> None:
        self.options = options

    @torch.no_grad()
    def __call__(self, inputs: FeatureInputs) -> Tensor:
        found = [self._of_sample(states) for states in _states_of_samples(inputs)]
        return torch.cat([inputs.logprobs.new_zeros((0, 4)), *(f.to(inputs.logprobs) for f in found)])

    def _of_sample(self, states: Tensor) -> Tensor:
        stride, length = self.options.stride, len(states)
        whole = effective_rank(states)
        rows: list[tuple[float, float, float, float]] = []
        ranks: list[float] = []
        for end in range(stride, length + 1, stride):
            rank = whole if end == length else effective_rank(states[:end])
            velocity = rank - sum(ranks) / len(ranks) if ranks else 0.0
            acceleration = velocity - rows[-1][2] if len(ranks) > 1 else 0.0
            rows.append((whole, rank, velocity, acceleration))
            ranks.append(rank)
        rows = rows or [(whole, whole, 0.0, 0.0)]
        stride_of_token = torch.arange(length).div(stride, rounding_mode="floor").clamp(max=len(rows) - 1)
        return torch.tensor(rows, dtype=torch.float64)[stride_of_token]


def effective_rank(states: Tensor) -> float:
    """Return the effective rank of states [n, d], n >= 1, after centering; 1 if all rows are equal."""
    centered = states.double() - states.double().mean(0)
    gram = centered @ centered.T if len(centered) <= centered.shape[1] else centered.T @ centered
    singular = torch.linalg.eigvalsh(gram).clamp(min=0).sqrt()
    # Rounding of the eigenvalues appears as singular values of up to sqrt(epsilon) of the largest one, so these are
    # noise.
    singular = singular[singular > singular.max() * len(gram) ** 0.5 * 2e-8]
    if not len(singular):
        return 1.0
    share = singular / singular.sum()
    return math.exp(-float((share * share.log()).sum()))


class MeanStateOptions(Settings):
    """Options of `mean_state`."""

    dimensions: PositiveInt = 32
    """Dimensions after the random projection. A value needs 4 bytes per dimension and trained token of the batch."""
    projection_seed: NonNegativeInt = 0
    """Seed of the projection, which is the same in all updates."""


class MeanState(Feature):
    """Mean of the states of the token's sample, projected at random, [m, dimensions]; the same at all tokens of the
    sample.

    The projection is sparse (Li, Hastie & Church 2006): with d the width of the states, an entry is not 0 with
    probability 1 / sqrt(d), and then has a random sign and the value d^(1/4) / sqrt(dimensions). It keeps distances in
    expectation.
    """

    Options: ClassVar[type[Settings]] = MeanStateOptions
    reads_hidden = True

    def __init__(self, *, options: MeanStateOptions) -> None:
        self.options = options

    @torch.no_grad()
    def __call__(self, inputs: FeatureInputs) -> Tensor:
        dimensions = self.options.dimensions
        found = [inputs.logprobs.new_zeros((0, dimensions))]
        for states in _states_of_samples(inputs):
            mean = states.float().mean(0, keepdim=True)
            found.append(
                (mean @ sparse_projection(states.shape[1], dimensions, self.options.projection_seed).to(mean))
                .expand(len(states), -1)
                .to(inputs.logprobs)
            )
        return torch.cat(found)


def sparse_projection(width: int, dimensions: int, seed: int) -> Tensor:
    """Return [width, dimensions], the projection of `MeanState`, which is a function of its arguments alone."""
    rng = torch.Generator().manual_seed(seed)
    shape = (width, dimensions)
    signs = 2.0 * torch.randint(2, shape, generator=rng) - 1.0
    chosen = torch.rand(shape, generator=rng) < float(width) ** -0.5
    projection: Tensor = signs * chosen * (float(width) ** 0.25 / float(dimensions) ** 0.5)
    return projection


def _states_of_samples(inputs: FeatureInputs) -> Iterator[Tensor]:
    """Yield the states [n, d] of each sample of the micro-batch, in the order of its tokens."""
    if inputs.hidden is None:
        raise ValueError("the feature reads hidden states, which this pass did not compute; `reads_hidden` must be set")
    number = inputs.columns["sample"]
    bounds = (number[1:] != number[:-1]).nonzero().squeeze(-1) + 1
    for states in torch.tensor_split(inputs.hidden.detach(), bounds.cpu()):
        if len(states):
            yield states
