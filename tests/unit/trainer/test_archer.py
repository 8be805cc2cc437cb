"""The critic of whole turns: its targets by hand, its buffer, and the advantage of a turn that decides a later
reward."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, TrainingSample
from rollmesh.trainer.config import LossTermChoice, OptimizerConfig, UpdateConfig
from rollmesh.trainer.estimators.archer import TurnCriticOptions
from rollmesh.trainer.losses import LossInputs
from rollmesh.trainer.losses.archer import CriticPair, td_loss, transitions
from rollmesh.trainer.optim import make_optimizer, set_lr
from rollmesh.trainer.update import BatchTrainer

from .builders import action, batch_of, group, member, minibatches, prompt, training_sample
from .gradient_check import plugins_of

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)
GOOD, BAD = 40, 41


def game() -> tuple[list[TrainingSample], list[GroupContext]]:
    """Return episodes of two turns of one token. The first turn decides, and the reward arrives after the second."""
    samples, members = [], []
    for number, first in enumerate((GOOD, BAD, GOOD, BAD)):
        second = 50 + number // 2
        path = [prompt([20, 21]), action([first], [-4.7]), prompt([30]), action([second], [-4.7])]
        samples.append(training_sample(f"s{number}", path))
        members.append(member(f"s{number}", {"r": float(first == GOOD)}))
    return samples, [group("g0", *members)]


def trainer(**critic: Any) -> BatchTrainer:
    config = UpdateConfig(
        estimator=Extension("archer", {"warmup_updates": 1000}),
        loss=(LossTermChoice("ppo_clip"), LossTermChoice("archer", critic)),
        update_rule=minibatches(1),
        optimizer=OptimizerConfig(lr=1e-3, modules_factor=5.0, warmup_updates=0),
    )
    return BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=7)


def test_an_early_decisive_turn_has_an_advantage_although_the_reward_is_at_the_end() -> None:
    """With the discount 0.9, Q of the first turn is 0.9 or 0, V before it is 0.45, and the second turn changes
    nothing."""
    samples, groups = game()
    made = trainer(discount=0.9, tau=0.3, capacity=64, replay=64)
    before = [p.clone() for p in made.model.parameters()]
    for k in range(1, 201):
        result = made.update(k, samples, groups)
    assert all(torch.equal(old, new) for old, new in zip(before, made.model.parameters(), strict=True)), "warm-up"
    assert result.metrics["archer/td_loss_share"] < 0.5
    estimator: Any = made.plugins.estimator
    estimator.options = TurnCriticOptions(warmup_updates=0)
    batch = batch_of(samples, groups, update=201)
    batch.table.columns.update(made._computed(batch.table, "start"))
    advantages = estimator(batch).advantages.reshape(4, 2)
    assert advantages[:, 0] == pytest.approx([0.45, -0.45, 0.45, -0.45], abs=0.25)
    assert advantages[:, 1] == pytest.approx([0, 0, 0, 0], abs=0.2)


def test_turns_become_transitions() -> None:
    """Sample 0 has turns of 2 and 1 tokens, sample 1 one turn of 1 token. States before and after token i are i and 10
    + i."""
    columns = {
        "sample": torch.tensor([0, 0, 0, 1]),
        "turn": torch.tensor([0, 0, 1, 0]),
        "reward": torch.tensor([1.0, 1.0, 1.0, 0.5]),
    }
    states = torch.arange(4.0)[:, None]
    found = transitions(LossInputs(torch.zeros(4), columns, states, states + 10))
    assert found["state"].squeeze(-1).tolist() == [0, 2, 3]
    assert found["action"].squeeze(-1).tolist() == [11, 12, 13]
    assert found["next"].squeeze(-1).tolist() == [2, 0, 0]
    assert (found["reward"].tolist(), found["done"].tolist()) == ([0, 1, 0.5], [0, 1, 1])


def test_the_loss_of_the_critic_equals_the_hand_computed_value() -> None:
    """Constant heads: Q = 2 and 3, V = 1 and 0; targets Q' = 5 and 4, V' = 10 and 20. One turn with r = 1 that is not
    the last one."""
    module = CriticPair(1)
    constants = {"critic": ([2.0, 3.0], [1.0, 0.0]), "target": ([5.0, 4.0], [10.0, 20.0])}
    for name, (q, v) in constants.items():
        critic: Any = getattr(module, name)
        for heads, values in ((critic.of_action, q), (critic.of_state, v)):
            for head, value in zip(heads, values, strict=True):
                torch.nn.init.zeros_(head[2].weight)
                torch.nn.init.constant_(head[2].bias, value)
    one = torch.ones(1, 1)
    turn = {"state": one, "action": one, "next": one, "reward": torch.ones(1), "done": torch.zeros(1)}
    expected = (2 - 6) ** 2 + (3 - 11) ** 2 + (1 - 5) ** 2 + (0 - 4) ** 2
    assert td_loss(module, turn, 0.5).item() == pytest.approx(expected)
    last = td_loss(module, {**turn, "done": torch.ones(1)}, 0.5)
    assert last.item() == pytest.approx((2 - 1) ** 2 + (3 - 1) ** 2 + (1 - 5) ** 2 + (0 - 4) ** 2)
    last.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in module.target.parameters())
    module.follow(0.25)
    target: Any = module.target
    assert target.of_action[0][2].bias.item() == pytest.approx(0.75 * 5 + 0.25 * 2)


def test_the_gradient_of_the_critic_equals_finite_differences_whatever_the_split() -> None:
    torch.manual_seed(0)
    module = CriticPair(3).double()
    turns = {name: torch.randn(5, 3, dtype=torch.float64) for name in ("state", "action", "next")}
    turns |= {"reward": torch.randn(5, dtype=torch.float64), "done": torch.tensor([0, 1, 0, 0, 1], dtype=torch.float64)}
    parameters = list(module.critic.parameters())
    gradient = torch.autograd.grad(td_loss(module, turns, 0.9), parameters)
    for parameter, found in zip(parameters, gradient, strict=True):
        direction, start = torch.randn_like(parameter), parameter.detach().clone()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.copy_(start + sign * 1e-6 * direction)
            values.append(td_loss(module, turns, 0.9).item())
        with torch.no_grad():
            parameter.copy_(start)
        assert float((found * direction).sum()) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-5, abs=1e-7)


def test_the_buffer_is_bounded_and_part_of_the_memory() -> None:
    samples, groups = game()
    made, again = trainer(capacity=10), trainer(capacity=10)
    for k in range(1, 4):
        made.update(k, samples, groups)
    memory = copy.deepcopy(made.memory())
    (state,) = (s for part, s in memory["plugins"].items() if part == "loss term archer")
    assert len(state["buffer"]["reward"]) == 10
    assert state["draws"] == 2, "the first step has no turns to draw"
    again.load_memory(memory)
    again.model.load_state_dict(made.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    again.step = 3
    results = [each.update(4, samples, groups) for each in (made, again)]
    assert results[0].metrics == results[1].metrics
    assert all(
        torch.equal(value, again.modules.state_dict()[name]) for name, value in made.modules.state_dict().items()
    )


def test_modules_have_their_own_learning_rate() -> None:
    model, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.5, modules_factor=4.0), head)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25, 1.0, 1.0]


def test_no_advantage_in_the_warm_up() -> None:
    samples, groups = game()
    batch = batch_of(samples, groups, update=20)
    batch.table.columns["archer_values"] = np.tile(np.array([[2.0, 0.5]], np.float32), (8, 1))
    estimator: Any = trainer().plugins.estimator
    estimator.options = TurnCriticOptions()
    assert not estimator(batch).advantages.any()
    later = batch_of(samples, groups, update=21)
    later.table.columns["archer_values"] = batch.table.columns["archer_values"]
    found = estimator(later)
    assert found.advantages.tolist() == [1.5] * 8
    assert (found.metrics["q_mean"], found.metrics["v_mean"]) == (2.0, 0.5)


def test_the_estimator_needs_the_term() -> None:
    assert plugins_of(LossTermChoice("archer")).requests["archer_values"].under == "start"
