"""Entropy bonus with a target: the coefficient rises while the entropy is below it, and falls above (Skywork-OR1, He et
al. 2025, arXiv:2505.22312, section 3.3; TRL `use_adaptive_entropy`).

    loss = - c 1[H <= target] H(pi)          H: mean entropy over the tokens of the optimizer step before, in nats
    c <- c + step if H <= target, else c - step,   within [coefficient_min, coefficient_max], after each optimizer step

A constant coefficient that is right for one stage of a run is too small or too large in another, which is the reason
for the control. It acts only below the target, so that it does not raise an entropy that is high enough. c and H are in
the checkpoint. Without H, in the first optimizer step of a run, there is no bonus. The target has to be near the
entropy of the first updates, which the metric `entropy` shows.

The bonus has the token weights of `learner.normalization`; that of TRL is a mean over tokens whatever the loss is.
Defaults are those of TRL and Skywork-OR1. The paper measures H before the step, which would cost one more forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, Settings
from rollmesh.trainer.features import FeatureRequest
from rollmesh.trainer.losses.base import LossInputs, LossTerm, TokenStats
from rollmesh.trainer.vocabulary_features import Entropy


class EntropyTargetOptions(Settings):
    """The target, and the control of the coefficient."""

    target: PositiveFloat = 0.2
    """Entropy per token below which the bonus acts, in nats."""
    step: PositiveFloat = 0.005
    """Change of the coefficient per optimizer step."""
    coefficient: NonNegativeFloat = 0.0
    """Coefficient at the begin of the run."""
    coefficient_min: NonNegativeFloat = 0.0
    """Smallest coefficient."""
    coefficient_max: PositiveFloat = 1.0
    """Largest coefficient."""

    def check_fields(self) -> None:
        if not self.coefficient_min <= self.coefficient <= self.coefficient_max:
            raise ValueError(
                f"`coefficient` must be in [coefficient_min, coefficient_max] = [{self.coefficient_min}, "
                f"{self.coefficient_max}], got {self.coefficient}"
            )


class EntropyTarget(LossTerm):
    """The bonus with its options, its coefficient and the last entropy."""

    Options: ClassVar[type[Settings]] = EntropyTargetOptions
    needs = ()
    needs_behavior = False
    features = {"entropy_target": FeatureRequest(Entropy(), "current", grad=True)}

    def __init__(self, *, options: EntropyTargetOptions) -> None:
        self.options = options
        self.coefficient = options.coefficient
        self.entropy: float | None = None
        """Mean entropy over the tokens of the last optimizer step."""
        self._seen: list[tuple[float, int]] = []
        """Sum of the entropies and number of tokens of each micro-batch of the step."""

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, TokenStats]:
        """Return the scalar loss, and per token `coefficient`, the one that is applied."""
        entropy = inputs["entropy_target"]
        self._seen.append((float(entropy.detach().double().sum()), len(entropy)))
        applied = self.coefficient if self.entropy is not None and self.entropy <= self.options.target else 0.0
        loss = -applied * (inputs["token_weight"] * entropy).sum()
        return loss, {"coefficient": torch.full_like(entropy.detach(), applied)}

    def exchange(self, in_order: Callable[[list[tuple[float, int]]], list[tuple[float, int]]]) -> None:
        """Take the entropies of the micro-batches of all ranks, and adapt the coefficient."""
        seen, self._seen = in_order(self._seen), []
        if count := sum(number for _, number in seen):
            self.entropy = sum(total for total, _ in seen) / count
            sign = 1 if self.entropy <= self.options.target else -1
            changed = self.coefficient + sign * self.options.step
            self.coefficient = min(max(changed, self.options.coefficient_min), self.options.coefficient_max)

    def state(self) -> dict[str, Any]:
        return {"coefficient": self.coefficient, "entropy": self.entropy}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.coefficient, self.entropy = state["coefficient"], state["entropy"]
