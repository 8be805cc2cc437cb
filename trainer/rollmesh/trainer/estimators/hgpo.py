"""Advantage per turn within groups of equal histories (HGPO, 2026-02, arXiv:2602.22817; code: langfengQ/verl-agent,
recipe/hgpo).

The turns of a group, over all members, form clusters of level k = 1, ..., history + 1: the turns whose last k
observations, that of the turn included, are identical. In every cluster of more than one turn, with the discounted
returns G from these turns on:

    a_k = (G - mean G) / (std G + epsilon)
    A   = sum over k of w_k a_k / sum over k of w_k,   w_k = (k + 1) ^ power, over the k with a_k != 0

`trajectory_term` adds k = 0, the advantage of the member in `grpo`, with weight 1. Why: turns with the same observation
but another history are in different situations. A longer common history has less bias and more variance, so that both
are averaged. `history: 0` compares the turns with equal observations alone. With `average: false`, A is the sum over k
of w_k a_k: for `history: 0`, `power: 0` and `trajectory_term` that is GiGPO (arXiv:2505.10978), the advantage of the
episode plus that of the step among the steps of its group with the same observation.

An observation is the digest of the token ids between two turns; the first one includes the prompt. A turn that is the
only one in all of its clusters has advantage 0, or the trajectory term. Deviations: rewards of the whole sample are
rewards of its last turn. Standard deviations are those of the population. An episode with several samples counts once:
each of its turns has a weight of 1 / samples, and the turns that its samples share are one turn when a cluster is
counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from rollmesh.shared.config.settings import NonNegativeFloat, NonNegativeInt, PositiveFloat, Settings, Share
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome
from rollmesh.trainer.estimators.base import GroupSize, centered, episode_weights
from rollmesh.trainer.estimators.turns import PerTurn, TurnEstimator, scored_members, turn_returns

Step = tuple[int, int]
"""Number of a member, and of its turn."""


class HgpoOptions(Settings):
    """Settings of the estimator `hgpo`."""

    history: NonNegativeInt = 2
    """Largest number of observations before a turn that are compared (K)."""
    power: NonNegativeFloat = 1.0
    """Exponent of the weight of a level (alpha). 0 weighs all levels equally."""
    discount: Share = 0.95
    """Factor of a reward per turn that it is later (gamma)."""
    scale_by_std: bool = True
    """Divide by the standard deviation of the cluster."""
    trajectory_term: bool = False
    """Whether the advantage of the whole member is a further level."""
    average: bool = True
    """Divide by the weights of the levels. False adds the levels, as GiGPO does."""
    epsilon: PositiveFloat = 1e-6
    """Added to the standard deviation."""


class Hgpo(TurnEstimator):
    """Average the normalized returns of a turn over clusters of equal histories."""

    Options: ClassVar[type[Settings]] = HgpoOptions
    group_size = GroupSize(least=2)

    def of_turns(self, group: GroupContext) -> dict[str, PerTurn]:
        """Return sample id -> advantage per turn."""
        options: HgpoOptions = self.options
        scored = scored_members(group, self.weights, options.discount)
        members = [member for member, _ in scored]
        if not members:
            return {}
        weights = episode_weights(members)
        epsilon = options.epsilon if options.scale_by_std else None
        levels: dict[Step, list[tuple[int, float]]] = defaultdict(list)
        for level, steps in clusters(members, [len(returns) for _, returns in scored], options.history):
            values = np.array([scored[i][1][t] for i, t in steps])
            of_steps = np.array([weights[i] for i, _ in steps])
            normalized = centered(values, of_steps / of_steps.sum(), epsilon)
            for step, value in zip(steps, normalized.tolist(), strict=True):
                levels[step].append((level, value))
        if options.trajectory_term:
            sums = [turn_returns(member, self.weights, 1.0) for member in members]
            whole = centered(np.array([0.0 if s is None else s[0] for s in sums]), weights, epsilon)
            for i, (_, returns) in enumerate(scored):
                for turn in range(len(returns)):
                    levels[i, turn].append((0, float(whole[i])))
        return {
            member.sample_id: np.array([self._average(levels[i, turn]) for turn in range(len(returns))])
            for i, (member, returns) in enumerate(scored)
        }

    def _average(self, levels: Sequence[tuple[int, float]]) -> float:
        """Return the weighted mean, or the weighted sum, of the advantages that are not 0, given with their levels."""
        weighed = [((level + 1) ** self.options.power, value) for level, value in levels if value != 0]
        total: float = sum(w * a for w, a in weighed)
        return total / sum(w for w, _ in weighed) if weighed and self.options.average else total


def clusters(members: Sequence[MemberOutcome], num_turns: Sequence[int], history: int) -> list[tuple[int, list[Step]]]:
    """Return the clusters with more than one turn, each with its level. A turn that several samples of an episode share
    counts once."""
    found: dict[tuple[int, tuple[str, ...]], list[Step]] = defaultdict(list)
    for i, (member, num) in enumerate(zip(members, num_turns, strict=True)):
        seen = [turn.observation for turn in member.summary.turns] or [""] * num
        for turn in range(num):
            for level in range(1, min(history, turn) + 2):
                found[level, tuple(seen[turn + 1 - level : turn + 1])].append((i, turn))

    def distinct(step: Step) -> tuple[str, int]:
        member = members[step[0]]
        turns = member.summary.turns
        return member.episode or member.sample_id, turns[step[1]].segment if turns else -1 - step[0]

    return [(level, steps) for (level, _), steps in found.items() if len({distinct(step) for step in steps}) > 1]
