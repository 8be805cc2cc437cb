"""The agent that samples many answers and keeps a diverse few of them, by their hidden states (RepExp, 2025-10,
arXiv:2510.11686; the estimator of training is `rep_exp`).

With h_i the mean of the last hidden states of answer i minus the mean over all answers, the agent chooses one answer
after the other, each time the one with the largest bonus among those that are left:

    b_i = h_i^T (ridge I + sum over the chosen j of h_j h_j^T)^-1 h_i

A copy of a chosen answer has a small bonus, and one that differs from all chosen ones a large bonus. The chosen answers
are the samples of an evaluation or of an export; while training the agent is `single_turn`. That the answers are chosen
one after the other is not established from the code of the paper, which has the training alone.

There are at most as many answers as turns that are left. If another limit ends the episode, the choice is of the
answers whose states are known by then.

The engine must return `hidden` for given tokens, as the torch engine does (docs/engines.md); its arrays have a largest
size, which bounds the length of an answer. `rollout.limits` must allow all answers. Name the agent as
`rollmesh.services.rollout.agents.diverse_answers:DiverseAnswersAgent`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from rollmesh.services.rollout.agent import Agent, Task
from rollmesh.services.rollout.environment import Environment
from rollmesh.services.rollout.rollout_tree import together
from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.shared.domain.trajectory import Purpose


class DiverseAnswersOptions(Settings):
    """Settings of the agent."""

    answers: PositiveInt = 16
    """Number of answers that are sampled."""
    keep: PositiveInt = 4
    """Number of answers that are chosen, at most `answers`."""
    ridge: PositiveFloat = 0.01
    """Weight of the identity in the covariance."""

    def check_fields(self) -> None:
        if self.keep > self.answers:
            raise ValueError(f"`keep` must be <= answers = {self.answers}, got {self.keep}")


class DiverseAnswersAgent(Agent):
    """Sample answers and make a diverse subset of them samples."""

    Options: ClassVar[type[Settings]] = DiverseAnswersOptions

    def __init__(self, *, options: DiverseAnswersOptions) -> None:
        self._options = options

    async def run(self, task: Task, env: Environment) -> None:
        if env.purpose is Purpose.TRAIN:
            await env.generate()
            return
        states: dict[int, NDArray[np.float64]] = {}
        branches = [env.branch() for _ in range(min(self._options.answers, env.turns_left))]

        async def answer(number: int) -> None:
            turn = await branches[number].generate()
            scored = await env.logprobs(turn.token_ids, outputs=["hidden"])
            states[number] = pooled(scored.arrays["hidden"])

        try:
            await together(answer(number) for number in range(len(branches)))
        finally:
            known = sorted(states)
            if known:
                rows = np.stack([states[number] for number in known])
                for row in most_diverse(rows, self._options.keep, self._options.ridge):
                    branches[known[row]].sample()


def pooled(states: NDArray[np.generic]) -> NDArray[np.float64]:
    """Return [d]: the mean of the states of tokens, [n, d]."""
    mean: NDArray[np.float64] = states.reshape(len(states), -1).astype(np.float64).mean(axis=0)
    return mean


def most_diverse(states: NDArray[np.float64], num: int, ridge: float) -> list[int]:
    """Return the numbers of `num` rows of `states` [n, d], in the order in which they are chosen.

    The bonuses are those of the products of the rows, without the matrix of the dimensions: ridge * b_i is what is left
    of the square of h_i after a regression on the chosen rows.
    """
    away = states - states.mean(axis=0)
    left = away @ away.T
    chosen: list[int] = []
    for _ in range(min(num, len(states))):
        bonus = np.diag(left).copy()
        bonus[chosen] = -np.inf
        best = int(np.argmax(bonus))
        chosen.append(best)
        left = left - np.outer(left[:, best], left[best]) / (left[best, best] + ridge)
    return chosen
