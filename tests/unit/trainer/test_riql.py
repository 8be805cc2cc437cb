"""The critic of `riql`: its loss by hand, its weights, and what a wrong reward does to its values."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.shared.config.registry import Extension
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.implicit_critic import ImplicitPair
from rollmesh.trainer.turn_critic import TrainingPlan

from .test_archer import batch_with, outcome

PLAN = TrainingPlan(discount=0.5, tau=0.1, steps=1, replay=8, capacity=8, lr=1e-3, clip_norm=1.0, huber=1.0)


def riql(**options: Any) -> Any:
    return make_estimator(Extension("riql", {"warmup_updates": 0, "replay": 64, **options}))


def constant(pair: ImplicitPair, q: tuple[float, ...], v: float, low: tuple[float, ...]) -> None:
    """Make the heads constants: Q, V, and the targets Q'. The target of V is 99, which nothing may read."""
    for critic, of_action, of_state in ((pair.critic, q, v), (pair.target, low, 99.0)):
        for heads, values in ((critic.of_action, of_action), (critic.of_state, (of_state,))):
            torch.nn.init.zeros_(heads.weights[2])
            heads.biases[2].data.copy_(torch.tensor(values)[:, None, None])


def turn(**values: float) -> dict[str, torch.Tensor]:
    one = torch.ones(1, 1)
    numbers = {"reward": 1.0, "done": 0.0, "q": 1.0, "v": 1.0, **values}
    return {"state": one, "action": one, "next": one, **{n: torch.full((1,), v) for n, v in numbers.items()}}


def test_the_loss_equals_the_hand_computed_value() -> None:
    """Q = 1.5, 2, 9, V = 3, and the quantile 0.25 of Q' = 0, 4, 8 is halfway between 0 and 4."""
    pair = ImplicitPair(1, 3, quantile=0.25, expectile=0.7, normalize=False)
    constant(pair, (1.5, 2.0, 9.0), 3.0, (8.0, 0.0, 4.0))
    target = 1 + 0.5 * 3.0
    huber = [(1.5 - target) ** 2, (2.0 - target) ** 2, 2 * abs(9.0 - target) - 1]
    above = 0.3 * (2.0 - 3.0) ** 2
    assert pair.loss(turn(), PLAN).item() == pytest.approx(sum(huber) / 3 + above)
    constant(pair, (1.5, 2.0, 9.0), 3.0, (6.0, 8.0, 9.0))
    below = 0.7 * (7.0 - 3.0) ** 2
    assert pair.loss(turn(), PLAN).item() == pytest.approx(sum(huber) / 3 + below)
    last = [(1.5 - 1) ** 2, (2.0 - 1) ** 2, 2 * (9.0 - 1) - 1]
    assert pair.loss(turn(done=1.0), PLAN).item() == pytest.approx(sum(last) / 3 + below)
    assert pair.loss(turn(q=0.0), PLAN).item() == pytest.approx(below), "a new action has no reward"
    pair.loss(turn(), PLAN).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in pair.target.parameters())
    assert pair.critic.of_state.biases[2].grad.item() == pytest.approx(-2 * 0.7 * (7.0 - 3.0)), "no gradient by V(s')"


def test_heads_read_states_that_are_normalized_over_the_buffer() -> None:
    pair = ImplicitPair(2, 1, quantile=0.5, expectile=0.5, normalize=True)
    states = torch.tensor([[0.0, 1e4], [2.0, 3e4]])
    pair.observe({"state": states, "action": 10 * states})
    seen: list[torch.Tensor] = []
    pair.critic.of_action.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    pair.critic.of_state.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    of_turns = {"state": states, "action": 10 * states, "next": states.flip(0)}
    pair.loss(of_turns | {name: torch.ones(2) for name in ("reward", "done", "q", "v")}, PLAN)
    after, both, state = seen
    # deviations are 1 and 1e4, those of actions 10 and 1e5; 1e-3 is added to each
    assert both.flatten().tolist() == pytest.approx([-1, -1, -1, -1, 1, 1, 1, 1], rel=2e-3)
    assert state.tolist() == both[:, :2].tolist()
    assert after.tolist() == state.flip(0).tolist()
    plain = ImplicitPair(2, 1, quantile=0.5, expectile=0.5, normalize=False)
    plain.observe({"state": states, "action": states})
    assert plain.get_buffer("state_scale").tolist() == [1, 1]


def test_the_weight_of_a_turn_is_the_exponential_of_its_advantage() -> None:
    """The advantages are 0.5, 0 and 3, and exp(3 * 3) is above the largest weight."""
    made = riql(center=False)
    weights, metrics = made.policy_weights(np.array([0.5, 0.0, 3.0]), np.array([True, True, True]))
    assert weights.tolist() == pytest.approx([np.exp(1.5), 1.0, 100.0])
    assert metrics == pytest.approx({"weight_mean": weights.mean(), "weight_capped_share": 1 / 3})
    _, metrics = made.policy_weights(np.array([0.5, 0.0, 3.0]), np.array([False, True, False]))
    assert metrics == {"weight_mean": 1.0, "weight_capped_share": 0.0}


def test_tokens_of_a_turn_have_its_weight_and_the_critic_passes_through_a_checkpoint() -> None:
    """The better action of the state has the larger weight, and no token has one in the warm-up."""
    states = np.zeros((3, 8))
    states[:, 0], states[:2, 7] = 1, 1
    members = outcome("s0", [1.0]), outcome("s1", [0.0])
    made = riql(critic_steps=60, critic_lr=2e-2, tau=0.1, warmup_updates=1)
    of = [batch_with(states, *members, lengths=((2,), (1,)), update=k) for k in (1, 2, 3)]
    assert not made(of[0]).advantages.any()
    found = made(of[1])
    assert found.advantages[0] == found.advantages[1] > 1 > found.advantages[2] > 0
    assert found.metrics["weight_mean"] == pytest.approx(found.advantages[1:].mean(), rel=1e-6)
    again = riql(critic_steps=60, critic_lr=2e-2, tau=0.1, warmup_updates=1)
    again.load_state(copy.deepcopy(made.state()))
    assert np.array_equal(again(of[2]).advantages, made(of[2]).advantages), "statistics of states are in the checkpoint"


@pytest.mark.row("S167")
def test_wrong_rewards_do_not_move_the_critic() -> None:
    """Two actions in one state have the rewards 1 and 0, and a fifth of the rewards of the worse one are 50. Their mean
    is 10, so a squared loss prefers the worse action. The Huber loss, linear beyond 0.05, leaves its value near 0."""
    states = np.zeros((20, 8), np.float32)
    states[:, 0], states[::2, 7] = 1, 1
    given = [50.0 if n % 10 == 1 else 1.0 - n % 2 for n in range(20)]
    members = [outcome(f"s{n}", [reward]) for n, reward in enumerate(given)]
    of = [batch_with(states, *members, lengths=((1,),) * 20, update=k) for k in (1, 2)]
    weights = {}
    for huber in (0.0, 0.05):
        made = riql(huber=huber, critic_steps=150, critic_lr=2e-2, tau=0.1, expectile=0.5, weight_max=1e9)
        made(of[0])
        weights[huber] = np.log(made(of[1]).advantages[:2]) / 3
    assert weights[0.0][1] > weights[0.0][0] + 2, "the squared loss prefers the worse action"
    assert weights[0.05].tolist() == pytest.approx([0.5, -0.5], abs=0.15)


@pytest.mark.row("S167")
def test_a_quantile_of_the_heads_costs_less_than_their_minimum() -> None:
    """One head of five has been led to -10 by wrong data, and the others agree on 1. V regresses to the minimum -10,
    and to the quantile 0.25 of 1."""
    found = {}
    for quantile in (0.0, 0.25):
        pair = ImplicitPair(1, 5, quantile=quantile, expectile=0.7, normalize=False)
        constant(pair, (0.0,) * 5, 0.0, (1.0, 1.0, -10.0, 1.0, 1.0))
        low, _ = pair.estimates(torch.ones(1, 1), torch.ones(1, 1))
        pair.loss(turn(q=0.0), PLAN).backward()  # type: ignore[no-untyped-call]
        found[quantile] = low.item(), pair.critic.of_state.biases[2].grad.item()
    assert found[0.0] == pytest.approx((-10.0, 2 * 0.3 * 10))
    assert found[0.25] == pytest.approx((1.0, -2 * 0.7))
