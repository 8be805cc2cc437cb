"""Advantages of the episode and of the step for episodes on a stored expert trajectory (UI-S1, 2025-09,
arXiv:2509.11543; code: X-PLUG/MobileAgent, UI-S1/uis1/core_uis1.py).

The agent `expert_replay` makes the episodes. Step t of all members of a group follows the same action number t of the
expert. With r_t the reward of the turn, and m_t whether it is the action of the expert (r_t >= `matched`):

    R_t = r_t + discount R_{t+1} if m_t, else r_t          R_{t+1} counts 0 if turn t + 1 is not the expert's, or was given
    A_S = (R_t - mean R_t) / (std R_t + epsilon)           over the sampled turns number t of the group
    A_E = (G - mean G) / (std G + epsilon),   G = sum of the r_t of an episode         over its episodes
    A_t = episode_weight A_E + step_weight A_S

A departure ends the sum, because the future after a patch is not that of the action. Given turns have no advantage and
are in no mean. A turn that several samples of an episode share, those with and without the turn that a patch replaced,
is one step, and its advantage is divided by the number of trained samples that contain it.

Constants are those of the published configuration: discount 0.5, both weights 1. Its code takes r_t itself in place of
G, over all steps of the group: `episode_level: step`. Deviations: standard deviations are those of the population; a
step that only one episode reached has A_S = 0, as in the code. The published script also drops groups in which the
standard deviation of R_0 is at most 0.3; the finalizer `zero_variance` drops those without any gradient.
"""  # noqa: E501, W505

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import numpy as np

from rollmesh.shared.config.settings import NonNegativeFloat, PositiveFloat, Settings, Share
from rollmesh.shared.domain.trajectory import WHOLE_SAMPLE, GroupContext, MemberOutcome, Outcome
from rollmesh.trainer.estimators.base import Estimate, GroupSize, centered, is_scored, turn_rewards, weight_of
from rollmesh.trainer.estimators.turns import PerTurn, TurnEstimator, spread_turns

if TYPE_CHECKING:  # it imports torch
    from rollmesh.trainer.batch import UpdateBatch

_Key = TypeVar("_Key")
StepKey = tuple[str, int]
"""Episode, and segment in which a turn of it ends; -1 without a summary."""


class UiS1Options(Settings):
    """Settings of the estimator `ui_s1`."""

    discount: Share = 0.5
    """Factor of a reward per turn that it is later (gamma)."""
    episode_weight: NonNegativeFloat = 1.0
    """Weight of the advantage of the episode."""
    step_weight: NonNegativeFloat = 1.0
    """Weight of the advantage of the step."""
    episode_level: Literal["return", "step"] = "return"
    """What the advantage of the episode compares: the sum of its rewards, or as in the published code each reward with
    those of all steps."""
    matched: float = 1.0
    """Least reward of a turn that is the action of the expert."""
    scale_by_std: bool = True
    """Divide by the standard deviation."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A turn that the policy sampled."""

    number: int
    """Number of the step, from 0."""
    reward: float
    future: float
    """Its discounted return."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The turns of a group."""

    paths: Mapping[str, tuple[StepKey, ...]]
    """Sample id -> keys of its turns."""
    sampled: Mapping[StepKey, SampledStep]
    """The turns that the policy sampled, by key."""


class UiS1(TurnEstimator):
    """Add the advantage of the episode and that of the step."""

    Options: ClassVar[type[Settings]] = UiS1Options
    group_size = GroupSize(least=2)

    def __call__(self, batch: UpdateBatch) -> Estimate:
        found: dict[str, PerTurn] = {}
        paths: dict[str, tuple[StepKey, ...]] = {}
        for group in batch.groups:
            steps = self._steps(group)
            paths |= steps.paths
            found |= self._advantages(steps)
        uses = Counter(key for s in batch.samples for key in paths.get(s.sample.sample_id, ()))
        for name in {s.sample.sample_id for s in batch.samples} & set(found):
            found[name] = found[name] / np.array([uses[key] for key in paths[name]])
        return spread_turns(batch, found)

    def of_turns(self, group: GroupContext) -> dict[str, PerTurn]:
        """Return sample id -> advantage per turn, not divided among the samples that share it."""
        return self._advantages(self._steps(group))

    def _steps(self, group: GroupContext) -> Steps:
        paths: dict[str, tuple[StepKey, ...]] = {}
        sampled: dict[StepKey, SampledStep] = {}
        for member in group.members:
            if not is_scored(member):
                continue
            episode = member.episode or member.sample_id
            turns = member.summary.turns
            path = tuple((episode, turn.segment) for turn in turns) or ((member.sample_id, -1),)
            own = [turn.num_tokens > 0 for turn in turns] or [True]
            paths[member.sample_id] = path
            future = 0.0
            rewards = self._rewards(member, own)
            for number in range(len(path) - 1, -1, -1):
                reward = float(rewards[number])
                matched = own[number] and reward >= self.options.matched
                future = reward + self.options.discount * future if matched else 0.0
                if own[number]:
                    sampled[path[number]] = SampledStep(number, reward, future if matched else reward)
        return Steps(paths, sampled)

    def _rewards(self, member: MemberOutcome, own: list[bool]) -> PerTurn:
        """Return [T] the reward of each turn; those of the whole sample count in the last sampled one."""
        whole = [r for r in member.rewards if r.segment == WHOLE_SAMPLE and r.outcome is Outcome.OK]
        rewards = np.array(turn_rewards(member, self.weights), dtype=np.float64)
        if not member.summary.turns:
            rewards = np.zeros(1)
        if any(own):
            last = max(number for number, is_own in enumerate(own) if is_own)
            rewards[last] += sum(weight_of(r.name, self.weights) * r.value for r in whole)
        return rewards

    def _advantages(self, steps: Steps) -> dict[str, PerTurn]:
        options: UiS1Options = self.options
        found: dict[StepKey, float] = defaultdict(float)
        at: dict[int, dict[StepKey, float]] = defaultdict(dict)
        for key, step in steps.sampled.items():
            at[step.number][key] = step.future
        for values in at.values():
            for key, value in self._centered(values).items():
                found[key] += options.step_weight * value
        if options.episode_level == "step":
            whole = self._centered({key: step.reward for key, step in steps.sampled.items()})
        else:
            totals: dict[str, float] = defaultdict(float)
            for (episode, _), step in steps.sampled.items():
                totals[episode] += step.reward
            of_episodes = self._centered(totals)
            whole = {key: of_episodes[key[0]] for key in steps.sampled}
        for key, value in whole.items():
            found[key] += options.episode_weight * value
        return {name: np.array([found.get(key, 0.0) for key in path]) for name, path in steps.paths.items()}

    def _centered(self, values: Mapping[_Key, float]) -> dict[_Key, float]:
        """Return the values minus their mean, divided by their standard deviation if the options say so."""
        numbers = np.array(list(values.values()))
        epsilon = self.options.epsilon if self.options.scale_by_std else None
        scaled = centered(numbers, np.full(len(numbers), 1.0 / max(1, len(numbers))), epsilon)
        return dict(zip(values, scaled.tolist(), strict=True))
