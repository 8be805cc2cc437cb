"""RED: imitate given solutions of prompts that the policy fails, with a weight that follows entropies (2025,
arXiv:2508.16677; code: millioniron/OpenRLHF-Millioniron-, openrlhf/trainer/ppo_utils/replay_buffer.py).

Recall-Extend Dynamics adds supervised fine-tuning on given solutions (terms `shifted_imitation` and `imitation`) to
reinforcement learning. With H the mean entropy of the policy at the start of the update, over own tokens (on) and over
tokens of given solutions (off), and E its moving average:

    change     d = |H - E|,   or |1 - H / E| with `relative`;   then E <- decay E + (1 - decay) H
    weight     w = clip((d_off / d_on) ^ power, weight_min, weight_max)        factor of every given solution in the loss
    accuracy   rho = mean reward of the group's own samples, in [0, 1]         column `accuracy` of `shifted_imitation`
    switch     a given solution is imitated if rho < imitate_below, and else dropped

With the default power of -1, w falls if the entropy changes mostly on given solutions: the policy already moves towards
them. Before the second update with both kinds of tokens, w is 1. Advantages of own samples are those of `grpo`, by
default without given solutions in the baseline. The averages are in the checkpoint.

The formulas of the paper were not available. The published code has relative changes since the last batch, the power 1,
and limits of 1 and 7: `{relative: true, decay: 0, power: 1, weight_min: 1, weight_max: 7}`. With it the weight rises if
the entropy changes mostly on given solutions, against the row of the catalog, which follows a description of the paper.
The code has no switch, because its advantage of a given solution is 0 if all own samples are right; `imitate_below` 1
does the same for rewards in [0, 1]. It normalizes with the given solution in the baseline: `baseline: all`.
"""  # noqa: E501, W505

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, Settings
from rollmesh.trainer.estimators.base import Estimate
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions, baseline_weights, given_ids

if TYPE_CHECKING:  # they import torch
    from rollmesh.trainer.batch import UpdateBatch
    from rollmesh.trainer.features import FeatureRequest

ENTROPY = "start_entropy"
ACCURACY = "accuracy"
SOLVED = "SOLVED"
"""Reason of a given solution that is not imitated, because the policy solves the prompt."""
CHANGE_MIN = 1e-6
"""Smallest change of an entropy, in nats, so that ratios are finite."""


class RedOptions(GrpoOptions):
    """Settings of the estimator `red`: those of `grpo`, the switch, and the weight of given solutions."""

    baseline: Literal["all", "policy"] = "policy"
    """Members in mean and standard deviation: `all`, or those that the `policy` sampled, without given solutions."""
    imitate_below: float = 0.5
    """Mean reward of the group's own samples below which its given solutions are imitated."""
    power: float = -1.0
    """Power of the change of entropy on given solutions over that on own tokens. Negative: the weight falls with the
    ratio."""
    relative: bool = False
    """Whether a change of entropy is divided by its average."""
    decay: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Share of the old average of the entropies that an update keeps."""
    weight_min: NonNegativeFloat = 0.1
    """Smallest weight."""
    weight_max: PositiveFloat = 5.0
    """Largest weight."""

    def check_fields(self) -> None:
        super().check_fields()
        if self.weight_min > self.weight_max:
            raise ValueError(f"`weight_min` must be <= weight_max = {self.weight_max}, got {self.weight_min}")


class Red(Grpo):
    """See the module."""

    Options: ClassVar[type[Settings]] = RedOptions
    needs = (ENTROPY,)
    columns = (ACCURACY,)

    def __init__(self, *, weights: Mapping[str, float], options: RedOptions) -> None:
        super().__init__(weights=weights, options=options)
        self._average: dict[str, float] = {}
        """Moving averages of the entropies, by `on` and `off`."""
        self._weight = 1.0
        """Weight of the last batch, for further estimates of it."""

    @property
    def features(self) -> dict[str, FeatureRequest]:
        from rollmesh.trainer.features import FeatureRequest  # they import torch, which the reward service lacks
        from rollmesh.trainer.vocabulary_features import Entropy

        return {ENTROPY: FeatureRequest(Entropy(), "start")}

    def __call__(self, batch: UpdateBatch) -> Estimate:
        external = batch.external
        if batch.repeat == 0:
            self._weight = self._advance(batch, external)
        base = super().__call__(batch)
        rates = self._rates(batch)
        least: float = self.options.imitate_below
        at: list[int] = [n for n in np.flatnonzero(external).tolist() if rates[n] >= least]
        solved = {number: SOLVED for number in at if number not in base.dropped}
        weights = np.where(external, self._weight, 1.0).astype(np.float32)
        metrics = {
            **base.metrics,
            "imitation_weight": self._weight,
            "imitated": float(external.sum() - len(solved)),
            "solved": float(len(solved)),
        }
        columns = {ACCURACY: batch.per_token(np.clip(rates, 0.0, 1.0).astype(np.float32))}
        dropped = {**base.dropped, **solved}
        return replace(base, sample_weights=weights, dropped=dropped, metrics=metrics, columns=columns)

    def state(self) -> dict[str, Any]:
        return {"average": self._average}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._average = dict(state["average"])

    def _advance(self, batch: UpdateBatch, external: NDArray[np.bool_]) -> float:
        """Return the weight for this batch, and move the averages towards its entropies."""
        options: RedOptions = self.options
        at = batch.per_token(external) > 0
        now = {name: float(batch[ENTROPY][mask].mean()) for name, mask in (("on", ~at), ("off", at)) if mask.any()}
        change = {name: self._change(h, self._average[name]) for name, h in now.items() if name in self._average}
        for name, h in now.items():
            self._average[name] = options.decay * self._average.get(name, h) + (1 - options.decay) * h
        if len(change) < 2:
            return 1.0
        log_weight = np.clip(options.power * np.log(change["off"] / change["on"]), -20.0, 20.0)
        return float(np.clip(np.exp(log_weight), options.weight_min, options.weight_max))

    def _change(self, entropy: float, average: float) -> float:
        scale = max(abs(average), CHANGE_MIN) if self.options.relative else 1.0
        return max(abs(entropy - average) / scale, CHANGE_MIN)

    def _rates(self, batch: UpdateBatch) -> NDArray[np.float64]:
        """Return [S] the mean reward of the own samples of the group of each sample; 0 if none has rewards."""
        given = given_ids(batch)
        rates: dict[str, float] = {}
        for group in batch.groups:
            members, sums = self.reward_sums(group)
            if any(m.sample_id not in given for m in members):
                rates[group.group] = float(baseline_weights(members, given) @ sums)
        return np.array([rates.get(sample.group, 0.0) for sample in batch.samples])
