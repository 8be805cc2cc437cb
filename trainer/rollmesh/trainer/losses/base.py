"""The port of loss terms, the built-in terms, and how token losses are summed.

A term is a pure function of tensors and frozen options. It sums `token_weight * loss of the token`. All normalization is in
`token_weight`, computed once per optimizer step over all of its tokens. That is why gradients accumulated over
micro-batches equal those of one big batch, whatever the split.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rollmesh.shared.registry import Registry
from rollmesh.trainer.config import Normalization

LOSSES = Registry(
    "loss term",
    {
        "ppo_clip": "rollmesh.trainer.losses.ppo_clip:PpoClip",
        "decoupled_ppo": "rollmesh.trainer.losses.decoupled_ppo:DecoupledPpo",
        "high_entropy": "rollmesh.trainer.losses.high_entropy:HighEntropy",
        "tis": "rollmesh.trainer.losses.tis:Tis",
    },
)

TokenStats = Mapping[str, Tensor]
"""Name -> detached [m] per-token numbers, which `metrics` averages or groups."""

FEATURES = ("proximal",)
"""Columns that the trainer computes if a loss needs them. `proximal` [m] is the log-prob under the policy before the update's
first optimizer step; it costs one more forward over the batch."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Trained tokens of one micro-batch, m of them. Log-probs are natural, at the sampling temperature.

    `logprobs` [m] (pi) carries the gradient. `columns` are tensors [m] or [m, k] by name, without gradient: those of
    `rollmesh.trainer.samples.TokenTable` (behavior is mu), `token_weight`, and what the loss needs.
    """

    logprobs: Tensor
    columns: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        """Return a column. Raises ValueError if the update does not have it."""
        if name not in self.columns:
            known = ", ".join(sorted(self.columns))
            raise ValueError(
                f"the loss reads the column `{name}`, which does not exist; columns are {known}; outputs of the engine and "
                f"{', '.join(FEATURES)} must be named in `needs`"
            )
        return self.columns[name]


class PolicyLoss(Protocol):
    """A term with its options. Constructed as `cls(options=...)`, or as `cls()` if the class has no `Options`."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the columns that it reads beside those that every update has: `FEATURES` and outputs of the engine."""
        ...

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar to add to the step's loss, and statistics per token."""
        ...


@runtime_checkable
class PreparedLoss(PolicyLoss, Protocol):
    """A term that reads values over all tokens of an optimizer step, such as a quantile or a sum per sample."""

    def prepare(self, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return further columns, given those of all tokens of the step. Their names begin with the name of the term."""
        ...


def engine_outputs(loss: PolicyLoss) -> tuple[str, ...]:
    """Return the names of the engine outputs that a loss needs."""
    return tuple(name for name in loss.needs if name not in FEATURES)


def check_outputs(loss: PolicyLoss, outputs: Collection[str]) -> None:
    """Raise ValueError if a loss needs an engine output that is not among `outputs`, which the run records."""
    if missing := [name for name in engine_outputs(loss) if name not in outputs]:
        raise ValueError(
            f"`rollout.outputs` must contain {', '.join(missing)}, which the loss needs, got [{', '.join(outputs)}]; "
            "add it, if the engine can return it"
        )


def token_weights(lengths: Sequence[int], sample_weights: Sequence[float], normalization: Normalization) -> Tensor:
    """Return weights [sum of lengths] of the tokens of one optimizer step. `lengths` are trained tokens per sample, all > 0.

    Sample weights scale the numerator only, so a sample of weight 0.5 has half of the gradient.
    """
    counts = torch.tensor(lengths, dtype=torch.float64)
    if normalization is Normalization.TOKEN:
        per_sample = torch.ones_like(counts) / counts.sum()
    else:
        per_sample = 1.0 / (len(lengths) * counts)
    per_sample = per_sample * torch.tensor(sample_weights, dtype=torch.float64)
    return per_sample.repeat_interleave(torch.tensor(lengths)).float()
