"""GRPO with a reward for answers whose hidden states differ from those of their group (RepExp, 2025-10,
arXiv:2510.11686; code: verl-project/verl-recipe, folder rep_exp).

With h_i the mean of the last hidden states of answer i, projected at random, minus the mean of the h of its group:

    S        = lambda I + sum_j h_j h_j^T                     over the answers j of the group
    leverage       b_i = h_i^T S^-1 h_i                       between 0 and 1
    leave_one_out  b_i = h_i^T (S - h_i h_i^T)^-1 h_i         = leverage / (1 - leverage)
    R_i     <- R_i + beta b_i,   then as `grpo`

Both have M = (lambda I + H H^T)^-1 over the answers: leverage_i = 1 - lambda M_ii. The options `skip_*` give a group,
or an answer, no bonus; the paper's runs skip groups without a right answer, which is the default here. h is under
`learner.reference`, which is the initial model by default, as in the code; `under: start` takes the policy and needs no
second model.

With `covariance: task`, the sum and the mean of h are over all answers to the task so far, those of the group included
(`persist_covariance` of the code): an answer that earlier updates have seen has a small bonus. The memory is a mean and
a matrix per task, in the checkpoint. The paper's runs have `group`.

Deviations: h is the mean over the trained tokens of the states from which they are predicted. The projection is the
same in all updates, where the code draws one each time, which a memory could not use. A member that is scored but not
trained has no states here; it gets the mean bonus of its group, so that the baseline is not biased.

At inference `services/rollout/agents/diverse_answers.py` chooses a diverse subset of answers by the bonus among those
that it has chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rollmesh.shared.config.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, Settings
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import UNDECIDED, Estimate
from rollmesh.trainer.estimators.grpo import Grpo, GrpoOptions

if TYPE_CHECKING:  # they import torch
    from rollmesh.trainer.batch import UpdateBatch
    from rollmesh.trainer.features import FeatureRequest

STATE = "rep_exp_state"
Kind = Literal["leverage", "leave_one_out"]


class RepExpOptions(GrpoOptions):
    """Settings of the estimator `rep_exp`: those of `grpo`, and the bonus."""

    beta: NonNegativeFloat = 0.01
    """Factor of the bonus."""
    kind: Kind = "leverage"
    """`leverage` is at most 1. `leave_one_out` excludes the answer from the covariance, and is large if the answer is
    alone in a direction."""
    covariance: Literal["group", "task"] = "group"
    """Answers in the covariance: those of the `group`, or all to the `task` so far, which takes 8 bytes per squared
    dimension and task."""
    ridge: PositiveFloat = 0.01
    """lambda: weight of the identity in the covariance."""
    normalize: Literal["none", "std", "z_score"] = "none"
    """Divide the bonuses of a group by their standard deviation (`std`), after subtracting their mean (`z_score`)."""
    dimensions: Annotated[int, Meta(ge=1, le=1024)] = 32
    """Dimensions of the projection. The paper has 32 for short answers and 128 for long ones."""
    projection_seed: NonNegativeInt = 0
    """Seed of the projection."""
    under: Literal["reference", "start"] = "reference"
    """Weights of the hidden states."""
    right_min: float = 0.5
    """Least weighted reward sum of a right answer, for the options `skip_*`."""
    skip_none_right: bool = True
    """Give no bonus in a group without a right answer."""
    skip_some_right: bool = False
    """Give no bonus in a group with right and wrong answers."""
    skip_all_right: bool = False
    """Give no bonus in a group of right answers."""
    skip_wrong: bool = False
    """Give no bonus to a wrong answer."""

    def check_fields(self) -> None:
        if self.covariance == "task" and self.kind != "leverage":
            raise ValueError(f"`kind` must be leverage with covariance: task, got {self.kind}")


class RepExp(Grpo):
    """Add the bonus to the reward sums."""

    Options: ClassVar[type[Settings]] = RepExpOptions
    needs = (STATE,)

    def __init__(self, *, weights: Mapping[str, float], options: RepExpOptions) -> None:
        super().__init__(weights=weights, options=options)
        self._seen: dict[str, Scatter] = {}
        """Task -> the answers to it so far; empty with `covariance: group`."""

    @property
    def features(self) -> dict[str, FeatureRequest]:
        from rollmesh.trainer.features import FeatureRequest  # imports torch, which the reward service lacks
        from rollmesh.trainer.hidden_features import MeanState, MeanStateOptions

        options: RepExpOptions = self.options
        chosen = MeanStateOptions(dimensions=options.dimensions, projection_seed=options.projection_seed)
        return {STATE: FeatureRequest(MeanState(options=chosen), options.under)}

    def __call__(self, batch: UpdateBatch) -> Estimate:
        states = batch.first(batch[STATE]).astype(np.float64)
        numbers = {(s.group, s.sample.sample_id): number for number, s in enumerate(batch.samples)}
        scored: list[tuple[list[MemberOutcome], NDArray[np.float64]]] = []
        given: list[float] = []
        for group in batch.groups:
            members, sums = self.reward_sums(group)
            own = [numbers.get((group.group, m.sample_id)) for m in members]
            bonus = self._bonus(members, sums, self._raw(group, states[[n for n in own if n is not None]], batch), own)
            scored.append((members, sums + self.options.beta * bonus))
            given += bonus.tolist()
        found = self.spread(batch, self.of_sums(scored, self.given(batch)))
        metrics = {"bonus_mean": float(np.mean(given)) if given else 0.0, "bonus_max": max(given, default=0.0)}
        return replace(found, metrics={**found.metrics, **metrics})

    def of_group(self, group: GroupContext) -> dict[str, float]:
        """Return sample id -> advantage without the bonus; `UNDECIDED` if it is 0 for all members and the group has a
        bonus."""
        found = super().of_group(group)
        members, sums = self.reward_sums(group)
        if len(found) > 1 and not any(found.values()) and self._gates(sums).any():
            return {m.sample_id: UNDECIDED for m in members}
        return found

    def _bonus(
        self,
        members: list[MemberOutcome],
        sums: NDArray[np.float64],
        raw: NDArray[np.float64],
        numbers: Sequence[int | None],
    ) -> NDArray[np.float64]:
        """Return the bonus [n] of the members of a group, given those of the leased ones and the numbers of the
        members' samples."""
        leased = np.array([number is not None for number in numbers], dtype=bool)
        if not leased.any():
            return np.zeros(len(members))
        own = normalized(raw, self.options.normalize)
        bonus = np.full(len(members), own.mean())
        bonus[leased] = own
        return np.where(self._gates(sums), bonus, 0.0)

    def _raw(self, group: GroupContext, states: NDArray[np.float64], batch: UpdateBatch) -> NDArray[np.float64]:
        """Return the bonus [n] of the states of a group. A memory takes them once."""
        options: RepExpOptions = self.options
        if not len(states):
            return np.zeros(0)
        if options.covariance == "group":
            return elliptical_bonus(states, options.kind, options.ridge)
        if batch.repeat == 0:
            self._seen[group.task] = self._seen.get(group.task, Scatter.of(states[:0])).plus(Scatter.of(states))
        return self._seen[group.task].leverage(states, options.ridge)

    def state(self) -> dict[str, Any]:
        import torch  # the reward service, which does not call this, lacks it

        return {
            task: {"num": one.num, "mean": torch.from_numpy(one.mean), "scatter": torch.from_numpy(one.scatter)}
            for task, one in self._seen.items()
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._seen = {
            task: Scatter(one["num"], one["mean"].numpy(), one["scatter"].numpy()) for task, one in state.items()
        }

    def _gates(self, sums: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return [n]: whether a member of a group with these reward sums may have a bonus."""
        options: RepExpOptions = self.options
        right = sums >= options.right_min
        skipped = options.skip_some_right
        if right.all():
            skipped = options.skip_all_right
        elif not right.any():
            skipped = options.skip_none_right
        gates: NDArray[np.bool_] = right | (not options.skip_wrong)
        return gates & (not skipped)


@dataclass(frozen=True, slots=True)
class Scatter:
    """States of answers: their number, their mean [d], and the sum of the squares of their deviations from it, [d,
    d]."""

    num: int
    mean: NDArray[np.float64]
    scatter: NDArray[np.float64]

    @classmethod
    def of(cls, states: NDArray[np.float64]) -> Scatter:
        """Return that of states [n, d]."""
        mean = states.mean(0) if len(states) else np.zeros(states.shape[1])
        return cls(len(states), mean, (states - mean).T @ (states - mean))

    def plus(self, other: Scatter) -> Scatter:
        """Return that of both sets of answers."""
        num, step = self.num + other.num, other.mean - self.mean
        between = np.outer(step, step) * (self.num * other.num / max(1, num))
        mean = self.mean + step * (other.num / max(1, num))
        return Scatter(num, mean, self.scatter + other.scatter + between)

    def leverage(self, states: NDArray[np.float64], ridge: float) -> NDArray[np.float64]:
        """Return the bonus [n] of states [n, d] that are among the answers."""
        away = states - self.mean
        solved = np.linalg.solve(self.scatter + ridge * np.eye(len(self.mean)), away.T)
        bonus: NDArray[np.float64] = (away * solved.T).sum(1)
        return bonus


def elliptical_bonus(states: NDArray[np.float64], kind: Kind, ridge: float) -> NDArray[np.float64]:
    """Return the bonus [n] of states [n, d] of one group."""
    centered = states - states.mean(0)
    inverse = np.linalg.inv(centered @ centered.T + ridge * np.eye(len(centered)))
    rest = ridge * np.diag(inverse)  # 1 - leverage, without cancellation
    bonus: NDArray[np.float64] = 1.0 - rest if kind == "leverage" else 1.0 / rest - 1.0
    return bonus


def normalized(bonus: NDArray[np.float64], how: Literal["none", "std", "z_score"]) -> NDArray[np.float64]:
    """Return bonuses [n] divided by their standard deviation, and centered, as `how` says; equal ones are not
    divided."""
    if how == "none":
        return bonus
    if how == "z_score":
        bonus = bonus - bonus.mean()
    std = float(bonus.std())
    return bonus / std if std > 1e-12 else bonus
