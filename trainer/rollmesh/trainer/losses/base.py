"""The port of loss terms, the built-in terms, and how token losses are summed.

A term is a function of tensors and frozen options. It sums `token_weight * loss of the token`. All normalization is in
`token_weight`, computed once per optimizer step over all of its tokens. That is why gradients accumulated over
micro-batches equal those of one big batch, whatever the split. A term whose value couples tokens of several samples is
a `CoupledLoss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollmesh.shared.config.plugin import optional_attribute, required
from rollmesh.shared.config.registry import Registry
from rollmesh.trainer.config import Normalization
from rollmesh.trainer.part import UpdatePart

TokenStats = Mapping[str, Tensor]
"""Name -> detached [m] per-token numbers, which `metrics` averages or groups."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Trained tokens of one micro-batch, m of them. Log-probs are natural, at the sampling temperature.

    `logprobs` [m] (pi) carries the gradient. `columns` are tensors [m] or [m, k] by name: those of
    `rollmesh.trainer.samples.TokenTable` (behavior is mu), `advantages`, `reward`, `token_weight`, and what the loss
    needs. Only features that were requested with a gradient have one. All tokens of a sample are in one micro-batch.
    """

    logprobs: Tensor
    columns: Mapping[str, Tensor]
    hidden: Tensor | None = None
    """[m, d] last hidden states with gradient, from which the tokens are predicted, if some term has a module."""
    after: Tensor | None = None
    """[m, d] last hidden states with gradient that have read the tokens."""

    def __getitem__(self, name: str) -> Tensor:
        """Return a column. Raises ValueError if the update does not have it."""
        if name not in self.columns:
            known = ", ".join(sorted(self.columns))
            raise ValueError(
                f"the loss reads the column `{name}`, which does not exist; columns are {known}; outputs of the engine "
                "and features must be named in `needs`"
            )
        return self.columns[name]

    def sample_sums(self, values: Tensor) -> Tensor:
        """Return [m]: for each token, the sum of `values` [m] over the tokens of its sample."""
        number = self["sample"] - self["sample"].min()
        sums = values.new_zeros(int(number.max()) + 1).index_add(0, number, values)
        return sums[number]

    def sample_means(self, values: Tensor) -> Tensor:
        """Return [m]: for each token, the mean of `values` [m] over the trained tokens of its sample."""
        return self.sample_sums(values) / self.sample_sums(torch.ones_like(values))


class LossTerm(UpdatePart):
    """Base of loss terms. Constructed as `cls(options=...)`, or as `cls()` if the class has no `Options`."""

    @optional_attribute
    def where(self) -> str:
        """Its token set unless the configuration names one: `policy`, `external` or `all`."""
        return "all"

    @optional_attribute
    def whole_groups(self) -> bool:
        """Whether the samples of a group must be in one optimizer step."""
        return False

    @required
    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar to add to the step's loss, and statistics per token."""
        raise NotImplementedError

    def prepare(self, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return further columns, such as a quantile, given those of all tokens of an optimizer step. Their names begin
        with the name of the term."""
        return {}

    def make_module(self, hidden_size: int) -> nn.Module:
        """Return a module that the optimizer trains and the checkpoint holds, but that is never published. Without this
        method it has none."""
        raise NotImplementedError

    def exchange(self, in_order: Callable[[list[Any]], list[Any]]) -> None:
        """Exchange what the term has kept of each micro-batch of a step: `in_order(own)` returns that of all ranks, in
        their order."""


class CoupledLoss(LossTerm):
    """Base of terms whose value is a function of the log-probs of all tokens of an optimizer step, such as a sum over a
    group.

    A subclass defines `name`, with which its columns begin, and `value`. The gradient is exact: `prepare`
    differentiates `value` by the log-probs, which a first forward computed, and the micro-batches apply that gradient
    to theirs. It costs one more forward.
    """

    name: ClassVar[str]
    needs: tuple[str, ...] = ("current",)

    def value(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, TokenStats]:
        """Return the scalar, given log-probs [M] with gradient and the columns of all tokens of the step, and
        statistics [M]."""
        raise NotImplementedError

    def prepare(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        current = columns["current"].detach().clone().requires_grad_()
        value, stats = self.value(current, columns)
        (gradient,) = torch.autograd.grad(value, current) if value.requires_grad else (torch.zeros_like(current),)
        constant = value.detach() / len(current) - gradient * current.detach()
        own = {"gradient": gradient, "constant": constant, **stats}
        return {f"{self.name}/{key}": values.detach() for key, values in own.items()}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        begin = f"{self.name}/"
        own = {key.removeprefix(begin): values for key, values in inputs.columns.items() if key.startswith(begin)}
        loss = (own.pop("gradient") * inputs.logprobs + own.pop("constant")).sum()
        return loss, own


LOSSES = Registry(
    "loss term",
    {
        "ppo_clip": "rollmesh.trainer.losses.ppo_clip:PpoClip",
        "decoupled_ppo": "rollmesh.trainer.losses.decoupled_ppo:DecoupledPpo",
        "high_entropy": "rollmesh.trainer.losses.high_entropy:HighEntropy",
        "policy_gradient": "rollmesh.trainer.losses.policy_gradient:PolicyGradient",
        "gspo": "rollmesh.trainer.losses.gspo:Gspo",
        "gmpo": "rollmesh.trainer.losses.gmpo:Gmpo",
        "covariance": "rollmesh.trainer.losses.covariance:Covariance",
        "kl": "rollmesh.trainer.losses.kl:KlPenalty",
        "rover": "rollmesh.trainer.losses.rover:Rover",
        "siren": "rollmesh.trainer.losses.siren:Siren",
        "drpo": "rollmesh.trainer.losses.drpo:Drpo",
        "refuel": "rollmesh.trainer.losses.refuel:Refuel",
        "dsdr_entropy": "rollmesh.trainer.losses.dsdr_entropy:DsdrEntropy",
        "progress": "rollmesh.trainer.losses.progress:Progress",
        "lp_reg": "rollmesh.trainer.losses.lp_reg:LpReg",
        "entropy": "rollmesh.trainer.losses.entropy:EntropyBonus",
        "imitation": "rollmesh.trainer.losses.imitation:Imitation",
        "shifted_imitation": "rollmesh.trainer.losses.shifted_imitation:ShiftedImitation",
        "topr": "rollmesh.trainer.losses.topr:Topr",
        "dppo": "rollmesh.trainer.losses.dppo:Dppo",
        "entropy_target": "rollmesh.trainer.losses.entropy_target:EntropyTarget",
        "value": "rollmesh.trainer.losses.value:Value",
        "positive_lm": "rollmesh.trainer.losses.positive_lm:PositiveLm",
        "router": "rollmesh.trainer.losses.router:RouterBalance",
        "rl_plus": "rollmesh.trainer.losses.rl_plus:RlPlus",
        "one_token_rollout": "rollmesh.trainer.losses.one_token_rollout:OneTokenRollout",
        "first_prompt": "rollmesh.trainer.losses.first_prompt:FirstPromptGradient",
    },
    LossTerm,
)


def equal_groups(groups: NDArray[Any], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return factors [S] of sample weights with which all groups of an update have the same sum of sample weights.
    `groups` [S] are the numbers of the groups of its samples, and `weights` [S] their weights, 0 for a sample that is
    not trained.

    The factor of a sample of group g is (W / groups) / W_g, with the sum W of all weights, W_g of those of g, and the
    number of groups with a weight. So the sum of all weights stays W. A group without a weight has the factor 1.
    """
    numbers = groups.astype(np.int64)
    sums = np.bincount(numbers, weights, minlength=1)
    mean = sums.sum() / max(1, np.count_nonzero(sums))
    factors: NDArray[np.float64] = np.where(sums > 0.0, mean / np.where(sums > 0.0, sums, 1.0), 1.0)[numbers]
    return factors


def token_weights(
    lengths: Sequence[int], sample_weights: Sequence[float], normalization: Normalization, constant: int = 1
) -> Tensor:
    """Return weights [sum of lengths] of the tokens of one optimizer step. `lengths` are trained tokens per sample, all
    > 0.

    Sample weights scale the numerator only, so a sample of weight 0.5 has half of the gradient.
    """
    counts = torch.tensor(lengths, dtype=torch.float64)
    if normalization is Normalization.TOKEN:
        per_sample = torch.ones_like(counts) / counts.sum()
    elif normalization is Normalization.SEQUENCE_MEAN:
        per_sample = 1.0 / (len(lengths) * counts)
    else:
        per_sample = torch.ones_like(counts) / (len(lengths) * constant)
    per_sample = per_sample * torch.tensor(sample_weights, dtype=torch.float64)
    return per_sample.repeat_interleave(torch.tensor(lengths)).float()
