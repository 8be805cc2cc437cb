"""Small estimators, loss terms, features and update rules that use one corner of the learning port each. Loaded by
file, as a user's."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from rollmesh.shared.config.settings import Settings
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.estimators import Estimate, GroupEstimator
from rollmesh.trainer.features import Feature, FeatureInputs, FeatureRequest
from rollmesh.trainer.losses import CoupledLoss, LossInputs, LossTerm, TokenStats
from rollmesh.trainer.update_rules import OptimizerStep, UpdateRule
from rollmesh.trainer.vocabulary_features import Entropy


class Plain(GroupEstimator):
    """Every token has advantage 1."""

    def of_group(self, group: Any) -> dict[str, float]:
        return {m.sample_id: 1.0 for m in group.members}


class Shaped(Plain):
    """Drops sample 0, halves sample 1, masks the first turn, and counts batches."""

    def __init__(self, *, weights: Mapping[str, float]) -> None:
        super().__init__(weights=weights)
        self.seen: list[int] = []

    def __call__(self, batch: UpdateBatch) -> Estimate:
        self.seen.append(batch.update)
        weights = np.ones(len(batch.samples), np.float32)
        weights[1] = 0.5
        return Estimate(
            advantages=np.ones(len(batch["turn"]), np.float32),
            sample_weights=weights,
            dropped={0: "PIVOT"},
            token_mask=batch["turn"] > 0,
            metrics={"seen": len(self.seen), "last_lr": batch.last.get("lr", -1.0)},
        )

    def state(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.seen = list(state["seen"])


class Broken(Plain):
    """Returns NaN for sample 0 and an infinite weight for sample 1."""

    def __call__(self, batch: UpdateBatch) -> Estimate:
        advantages = np.ones(len(batch["sample"]), np.float32)
        advantages[0] = np.nan
        weights = np.ones(len(batch.samples), np.float32)
        weights[1] = np.inf
        return Estimate(advantages=advantages, sample_weights=weights)


class Short(Plain):
    """Returns one advantage too few."""

    def __call__(self, batch: UpdateBatch) -> Estimate:
        return Estimate(advantages=np.ones(len(batch["sample"]) - 1, np.float32))


class Seeing(Plain):
    """Reports what it reads."""

    needs = ("proximal", "reference", "gradient_square", "start_entropy")
    features = {"start_entropy": FeatureRequest(Entropy(), "start")}
    batches: ClassVar[list[UpdateBatch]] = []

    def __call__(self, batch: UpdateBatch) -> Estimate:
        self.batches.append(batch)
        return super().__call__(batch)


class Late(Plain):
    needs = ("current",)


class EntropyBonus(LossTerm):
    """Minus the entropy, with gradient."""

    needs = ()
    features = {"bonus": FeatureRequest(Entropy(), "current", grad=True)}

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        return -(inputs["token_weight"] * inputs["bonus"]).sum(), {"bonus": inputs["bonus"].detach()}


class GroupLogSum(CoupledLoss):
    """For each group, the log of the sum of exp of the samples' mean log-probs."""

    name = "group_log_sum"

    def value(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, TokenStats]:
        return group_log_sum(logprobs, columns), {"seen": torch.ones_like(logprobs)}


def group_log_sum(logprobs: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    sample, group = columns["sample"], columns["group"]
    total = logprobs.new_zeros(())
    for g in sorted(set(group.tolist())):
        means = [logprobs[sample == s].mean() for s in sorted(set(sample[group == g].tolist()))]
        total = total + torch.stack(means).logsumexp(0)
    return total


class Head(LossTerm):
    """Trains a linear head on the hidden states to the advantages, and nothing else."""

    needs = ()

    def make_module(self, hidden_size: int) -> nn.Module:
        self.module = nn.Linear(hidden_size, 1)
        return self.module

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        assert inputs.hidden is not None
        error = self.module(inputs.hidden.detach()).squeeze(-1) - inputs["advantages"]
        return (inputs["token_weight"] * error.square()).sum(), {"error": error.detach()}


class Squared(Feature):
    """A feature: the square of the log-prob, and the norm of the hidden state."""

    reads_hidden = True

    def __call__(self, inputs: FeatureInputs) -> Tensor:
        assert inputs.hidden is not None
        return torch.stack([inputs.logprobs.square(), inputs.hidden.norm(dim=-1)], dim=-1)


class BackwardsOptions(Settings):
    lr_factor: float = 1.0
    advantage_factor: float = 1.0


class Backwards(UpdateRule):
    """One step per turn, the last turn first, each with features of its moment."""

    Options: ClassVar[type[Settings]] = BackwardsOptions
    needs = ("proximal",)
    proximal: ClassVar[list[np.ndarray[Any, Any]]] = []

    def __init__(self, *, options: BackwardsOptions) -> None:
        self.options = options

    def steps(self, batch: UpdateBatch, rng: np.random.Generator) -> Iterator[OptimizerStep]:
        for number, turn in enumerate(sorted(set(batch["turn"].tolist()), reverse=True)):
            yield OptimizerStep(
                samples=range(len(batch.samples)),
                tokens=batch["turn"] == turn,
                lr_factor=self.options.lr_factor,
                advantage_factors=np.full(len(batch["turn"]), self.options.advantage_factor, np.float32),
                refresh=number > 0,
            )
            self.proximal.append(batch["proximal"].copy())
