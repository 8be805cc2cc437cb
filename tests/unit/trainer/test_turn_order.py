"""A game of two turns, on which `turn_by_turn` in reverse order reaches the optimum and a simultaneous update does not.

    turn 1: a = 0 -> reward 0.5, whatever turn 2 does;   a = 1 -> turn 2: b = 0 -> reward 0,  b = 1 -> reward 1

At first a is uniform and P(b = 1 | a = 1) = 0.2, so a = 1 is worth 0.2, less than a = 0. Its worth given a good turn 2
is 1. The steps are large: an update makes each turn almost a best response. A simultaneous update leaves a = 1 before
turn 2 is good, and is then stuck at 0.5, because no episode shows a = 1 any more. Backward induction improves turn 2
first, and then turn 1 given the better turn 2.

The policy is tabular, with separate parameters for the turns. So the order alone changes nothing here, and the
correction of the advantages is what makes a difference: it must be able to reach 1 / 0.2 = 5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.shared.config.registry import Extension
from rollmesh.trainer.config import LossTermChoice
from rollmesh.trainer.losses import LossInputs, LossSum
from rollmesh.trainer.update_rules import UPDATE_RULES, OptimizerStep

from .builders import action, batch_of, group, member, prompt, training_sample

REWARDS = np.array([[0.5, 0.5], [0.0, 1.0]])
EPISODES = 128
UPDATES = 4
STEP_SIZE = 64.0
SEEDS = range(5)
FULL: dict[str, Any] = {"correction_low": 1.0, "correction_high": 9.0}


class TwoTurns:
    """Logits of turn 1 [2], and of turn 2 by a [2, 2]."""

    def __init__(self) -> None:
        self.first = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        start = [[0.0, 0.0], [np.log(0.8), np.log(0.2)]]
        self.second = torch.tensor(start, dtype=torch.float64, requires_grad=True)

    def probabilities(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return self.first.softmax(-1).detach().numpy(), self.second.softmax(-1).detach().numpy()

    def value(self) -> float:
        """Return the expected reward."""
        first, second = self.probabilities()
        return float((first[:, None] * second * REWARDS).sum())

    def logprobs(self, a: Tensor, b: Tensor) -> Tensor:
        """Return [2 n], the log-probs of the actions of each episode, turn by turn."""
        second = self.second.log_softmax(-1)[a].gather(-1, b[:, None]).squeeze(-1)
        return torch.stack([self.first.log_softmax(-1)[a], second], dim=1).flatten()


def value_after(rule: Extension, seed: int) -> float:
    """Return the value of the policy after the updates, as the update of the trainer does them, with gradient
    descent."""
    policy, rng = TwoTurns(), np.random.default_rng(seed)
    loss = LossSum([LossTermChoice("decoupled_ppo", {"clip_low": 0.2, "clip_high": 0.2})])
    optimizer = torch.optim.SGD([policy.first, policy.second], lr=STEP_SIZE)
    for k in range(1, UPDATES + 1):
        first, second = policy.probabilities()
        a = (rng.random(EPISODES) < first[1]).astype(np.int64)
        b = (rng.random(EPISODES) < second[a, 1]).astype(np.int64)
        actions = torch.from_numpy(a), torch.from_numpy(b)
        of = batch_of(*episodes(REWARDS[a, b]), update=k)
        behavior = policy.logprobs(*actions).detach()
        advantages = np.repeat(REWARDS[a, b] - REWARDS[a, b].mean(), 2)
        of.table.columns.update(behavior=behavior.numpy(), proximal=behavior.numpy(), advantages=advantages)
        for step in UPDATE_RULES.make(rule).steps(of, np.random.default_rng([seed, k])):
            if step.refresh:
                of.table.columns["proximal"] = policy.logprobs(*actions).detach().numpy()
            if step.samples:
                chosen = torch.from_numpy(tokens_of(step, of["sample"]))
                columns = {name: torch.from_numpy(of[name])[chosen] for name in ("behavior", "proximal", "sample")}
                factors = 1.0 if step.advantage_factors is None else step.advantage_factors
                columns["advantages"] = torch.from_numpy(advantages * factors)[chosen]
                columns["token_weight"] = torch.full((len(chosen),), 1 / EPISODES, dtype=torch.float64)
                total, _ = loss(LossInputs(policy.logprobs(*actions)[chosen], columns))
                optimizer.zero_grad()
                total.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return policy.value()


def episodes(rewards: NDArray[np.float64]) -> tuple[list[Any], list[Any]]:
    """Return a sample of two turns with one token each per episode, and their group."""
    path = [prompt([13]), action([20], [-1.0]), prompt([14]), action([21], [-1.0])]
    names = [f"s{n}" for n in range(len(rewards))]
    members = (member(name, {"r": reward}) for name, reward in zip(names, rewards.tolist(), strict=True))
    return [training_sample(name, path) for name in names], [group("g0", *members)]


def tokens_of(step: OptimizerStep, sample: NDArray[np.int64]) -> NDArray[np.int64]:
    at = np.isin(sample, step.samples)
    return np.flatnonzero(at if step.tokens is None else at & step.tokens)


@pytest.mark.row("S035")
@pytest.mark.parametrize("seed", SEEDS)
def test_the_reverse_order_reaches_the_optimum(seed: int) -> None:
    assert value_after(Extension("turn_by_turn", FULL), seed) > 0.99


@pytest.mark.row("S035")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "rule",
    [
        Extension("minibatches", {"num_minibatches": 1}),
        Extension("turn_by_turn", {"order": "forward", **FULL}),
        Extension("turn_by_turn", {"correction": False}),
    ],
    ids=["simultaneous", "forward", "reverse without the correction"],
)
def test_other_updates_stay_at_the_safe_action(rule: Extension, seed: int) -> None:
    assert value_after(rule, seed) == pytest.approx(0.5, abs=0.02)


def test_the_default_limits_of_the_correction_are_too_narrow_for_this_game() -> None:
    """0.2 * 1.2 is less than 0.5: with ratios in [0.8, 1.2] turn 1 learns too little of the improved turn 2."""
    values = [value_after(Extension("turn_by_turn"), seed) for seed in SEEDS]
    assert np.mean(values) < 0.7, values
