"""The critic of whole turns: targets by hand, its buffer, new actions, and a late reward that early turns decide."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import (
    GroupContext,
    MemberOutcome,
    Outcome,
    Reward,
    SampleSummary,
    TrainingSample,
    TurnSummary,
)
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.config import LossTermChoice, OptimizerConfig, UpdateConfig
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.estimators.archer import turns_of
from rollmesh.trainer.estimators.base import UNDECIDED
from rollmesh.trainer.features import FeatureInputs
from rollmesh.trainer.hidden_features import sparse_projection
from rollmesh.trainer.optim import make_optimizer, set_lr
from rollmesh.trainer.turn_critic import CriticPair, td_loss
from rollmesh.trainer.turn_states import TurnStates, TurnStatesOptions
from rollmesh.trainer.update import BatchTrainer

from .builders import action, batch_of, group, member, minibatches, prompt, training_sample

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)
GOOD, BAD = 40, 41


def archer(**options: Any) -> Any:
    return make_estimator(Extension("archer", {"warmup_updates": 0, **options}))


def path_of(*lengths: int) -> list[Any]:
    """Return the segments of a prompt and one turn per length, with observations between them."""
    segments = [prompt([20])]
    for length in lengths:
        segments += [action([21] * length, [-0.7] * length, parent=len(segments) - 1)]
        segments += [structs.replace(prompt([22]), parent=len(segments) - 1)]
    return segments[:-1]


def outcome(
    sample_id: str, rewards: Sequence[float], *, whole: float | None = None, role: str = "", episode: str = ""
) -> MemberOutcome:
    """Return a member with one turn per reward, and a reward of the whole sample."""
    turns = tuple(TurnSummary(segment=2 * i + 1, num_tokens=1, mean_logprob=-0.7) for i in range(len(rewards)))
    found = [Reward(name="r", value=v, segment=2 * i + 1) for i, v in enumerate(rewards)]
    found += [] if whole is None else [Reward(name="r", value=whole)]
    summary = SampleSummary(turns=turns, role=role)
    return MemberOutcome(sample_id=sample_id, rewards=tuple(found), end="ready", episode=episode, summary=summary)


def batch_with(states: Any, *members: MemberOutcome, lengths: Sequence[Sequence[int]], update: int = 1) -> UpdateBatch:
    """Return one group with the states [M, 2d] of its tokens. `lengths` has those of the turns of each sample."""
    samples = [training_sample(m.sample_id, path_of(*of)) for m, of in zip(members, lengths, strict=True)]
    made = batch_of(samples, [group("g0", *members)], update=update)
    made.table.columns["archer_states"] = np.asarray(states, np.float32)
    return made


# States and transitions -----------------------------------------------------------------------------------------------


def test_the_states_before_and_after_a_turn() -> None:
    """Sample 0 has turns of 2 and 1 tokens, sample 1 one turn of 1 token. States before and after token i are i and 10
    + i."""
    columns = {"sample": torch.tensor([0, 0, 0, 1]), "turn": torch.tensor([0, 0, 1, 0])}
    states, none = torch.arange(4.0)[:, None], torch.zeros(4)
    made = FeatureInputs(
        logits=none[:, None], token_ids=none.long(), logprobs=none, hidden=states, after=states + 10, columns=columns
    )
    found = TurnStates(options=TurnStatesOptions())(made)
    assert found.tolist() == [[0, 11], [0, 11], [2, 12], [3, 13]]
    wide = torch.eye(4).repeat(1, 3)
    made.hidden, made.after = wide, 2 * wide
    projection = sparse_projection(12, 5, seed=3)
    found = TurnStates(options=TurnStatesOptions(dimensions=5, projection_seed=3))(made)
    assert torch.allclose(found[0], torch.cat([wide[0] @ projection, 2 * wide[1] @ projection]))
    assert found.shape == (4, 10)


def test_turns_become_transitions_with_the_rewards_of_turns_and_of_the_whole_sample() -> None:
    states = np.array([[0, 11], [0, 11], [2, 12], [3, 13], [4, 14]])
    failed = structs.replace(
        outcome("s2", [0.0]), rewards=(Reward(name="r", value=1.0, outcome=Outcome.INFRA_FAILURE),)
    )
    members = outcome("s0", [0.25, 0.0], whole=1.0), outcome("s1", [0.5]), failed
    found = turns_of(batch_with(states, *members, lengths=((2, 1), (1,), (1,))), {}, "new_action")
    columns = {name: values.squeeze().tolist() for name, values in found.columns.items()}
    # s1 lacks `whole`, which is filled in from s0.
    assert found.of_token.tolist() == [0, 0, 1, 2, 3]
    assert (columns["state"], columns["action"]) == ([0, 2, 3, 4], [11, 12, 13, 14])
    assert columns["next"] == [2, 0, 0, 0]
    assert (columns["reward"], columns["done"]) == ([0.25, 1.0, 0.5 + 1.0, 0], [0, 1, 1, 1])
    assert found.kept.tolist() == [True, True, True, False]
    assert (columns["q"], columns["v"]) == ([1, 1, 1, 1], [1, 1, 1, 1])


def test_members_without_a_summary_have_their_reward_in_the_last_turn() -> None:
    states = np.arange(6.0).reshape(3, 2)
    found = turns_of(batch_with(states, member("s0", {"r": 2.0}), lengths=((1, 1, 1),)), {}, "new_action")
    assert found.columns["reward"].tolist() == [0, 0, 2]


def test_a_new_action_is_the_target_of_its_state_and_trained_alone() -> None:
    """Episode e has a sample of two turns, and in the state of its second turn a new action."""
    states = np.array([[0, 10], [1, 11], [0, 10], [1, 12], [5, 15]])
    members = (
        outcome("s0", [0.0, 0.0], whole=1.0, episode="e"),
        outcome("s1", [0.0, 0.0], whole=0.7, episode="e", role="new_action"),
        outcome("s2", [0.0], whole=1.0, episode="f"),
    )
    of = batch_with(states, *members, lengths=((1, 1), (1, 1), (1,)))
    found = turns_of(of, {}, "new_action")
    assert found.columns["q"].tolist() == [1, 1, 0, 0, 1]
    assert found.columns["v"].tolist() == [0, 0, 0, 1, 1]
    assert found.columns["reward"].tolist() == [0, 1, 0, 0, 1]
    assert found.critics.tolist() == [True, True, False, True, True]
    estimate = archer(dimensions=1)(of)
    assert estimate.token_mask is not None
    assert estimate.token_mask.tolist() == [True, True, False, True, True]
    assert estimate.metrics["new_action_share"] == 0.25


# The critic -----------------------------------------------------------------------------------------------------------


def constant(pair: CriticPair) -> None:
    """Make the heads constants: Q = 2 and 3, V = 1 and 0; targets Q' = 5 and 4, V' = 10 and 20."""
    for critic, q, v in ((pair.critic, (2.0, 3.0), (1.0, 0.0)), (pair.target, (5.0, 4.0), (10.0, 20.0))):
        for heads, values in ((critic.of_action, q), (critic.of_state, v)):
            torch.nn.init.zeros_(heads.weights[2])
            heads.biases[2].data.copy_(torch.tensor(values)[:, None, None])


def test_the_loss_of_the_critic_equals_the_hand_computed_value() -> None:
    """One turn with r = 1 that is not the last one."""
    pair = CriticPair(1)
    constant(pair)
    one = torch.ones(1, 1)
    turn = {"state": one, "action": one, "next": one, **{name: torch.ones(1) for name in ("reward", "q", "v")}}
    expected = (2 - 6) ** 2 + (3 - 11) ** 2 + (1 - 5) ** 2 + (0 - 4) ** 2
    assert td_loss(pair, {**turn, "done": torch.zeros(1)}, 0.5).item() == pytest.approx(expected)
    last = td_loss(pair, {**turn, "done": torch.ones(1)}, 0.5)
    assert last.item() == pytest.approx((2 - 1) ** 2 + (3 - 1) ** 2 + (1 - 5) ** 2 + (0 - 4) ** 2)
    last.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in pair.target.parameters())
    both = {
        name: values.repeat(2, *[1] * (values.ndim - 1)) for name, values in {**turn, "done": torch.ones(1)}.items()
    }
    both |= {"q": torch.tensor([1.0, 0.0]), "v": torch.tensor([0.0, 1.0]), "reward": torch.tensor([1.0, 9.0])}
    assert td_loss(pair, both, 0.5).item() == pytest.approx(last.item()), "a new action has no reward"
    pair.follow(0.25)
    assert pair.target.of_action.biases[2][0].item() == pytest.approx(0.75 * 5 + 0.25 * 2)


def test_the_gradient_of_the_critic_equals_finite_differences() -> None:
    torch.manual_seed(0)
    module = CriticPair(3).double()
    turns = {name: torch.randn(5, 3, dtype=torch.float64) for name in ("state", "action", "next")}
    turns |= {"reward": torch.randn(5, dtype=torch.float64), "done": torch.tensor([0, 1, 0, 0, 1], dtype=torch.float64)}
    turns |= {name: torch.tensor([1.0, 1, 0, 1, 1], dtype=torch.float64) for name in ("q", "v")}
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


# Advantages -----------------------------------------------------------------------------------------------------------


def test_the_advantage_is_that_of_the_critic_before_the_batch_centered_over_turns() -> None:
    """The critic of the first batch learns Q = 1 and 0 for two single turns in one state, so V is 0.5."""
    states = np.zeros((2, 32))
    states[:, 0], states[0, 31] = 1, 1
    members = outcome("s0", [1.0]), outcome("s1", [0.0])
    made = archer(critic_steps=200, critic_lr=5e-3)
    first = made(batch_with(states, *members, lengths=((1,), (1,))))
    assert float(np.abs(first.advantages).max()) < 0.5, "the critic is untrained"
    again = made(replace(batch_with(states, *members, lengths=((1,), (1,))), repeat=1))
    assert np.array_equal(again.advantages, first.advantages), "a further estimate of the batch"
    second = made(batch_with(states, *members, lengths=((1,), (1,)), update=2))
    assert second.advantages.tolist() == pytest.approx([0.5, -0.5], abs=0.1)
    assert second.metrics["v_mean"] == pytest.approx(0.5, abs=0.1)
    assert len(made.state()["turns"]["reward"]) == 4, "the repeated batch counts once"
    shifted = made(batch_with(states[:1], members[0], lengths=((1,),), update=3))
    assert shifted.advantages.tolist() == [0.0], "the only turn has the mean"
    plain = archer(center=False)
    plain.load_state(copy.deepcopy(made.state()))
    found = plain(batch_with(states[:1], members[0], lengths=((1,),), update=3))
    assert found.advantages[0] == pytest.approx(0.5, abs=0.1)


def test_no_advantage_in_the_warm_up_and_none_for_what_is_not_scored() -> None:
    states = np.array([[1.0, 0, 0, 1], [1, 0, 0, 0], [np.nan] * 4])
    members = outcome("s0", [1.0]), member("s1", {}), outcome("s2", [1.0])
    made = archer(warmup_updates=1, critic_steps=1)
    first = made(batch_with(states, *members, lengths=((1,),) * 3))
    assert not np.nan_to_num(first.advantages).any()
    assert first.dropped == {1: "UNSCORED"}
    assert len(made.state()["turns"]["reward"]) == 1
    of = batch_with(states, *members, lengths=((1,),) * 3, update=2)
    assert made.of_group(of.groups[0]) == {"s0": UNDECIDED, "s2": UNDECIDED}
    nothing = archer()(batch_with(states[1:2], members[1], lengths=((1,),)))
    assert (nothing.dropped, nothing.metrics["advantage_abs"]) == ({0: "UNSCORED"}, 0.0)


def test_states_that_are_not_finite_do_not_reach_the_critic() -> None:
    """They follow the last turn of s0, which has no next state, and the first turn of s2, which is not stored."""
    states = np.array([[1.0, 0, 0, 1], [np.nan] * 4, [1, 0, 0, 1], [np.nan] * 4])
    members = outcome("s0", [1.0]), outcome("s1", [1.0]), outcome("s2", [0.0, 1.0])
    made = archer(critic_steps=2)
    found = made(batch_with(states, *members, lengths=((1,), (1,), (1, 1))))
    assert np.isfinite(found.metrics["td_loss"])
    assert made.state()["turns"]["reward"].tolist() == [1.0]
    again = made(batch_with(states, *members, lengths=((1,), (1,), (1, 1)), update=2))
    assert np.isfinite(again.advantages[0])


def test_the_critic_passes_through_a_checkpoint(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    made, again = (archer(critic_steps=5, capacity=6, replay=4) for _ in range(2))
    batches = [
        batch_with(
            rng.normal(size=(4, 6)), outcome("s0", [0, 1.0]), outcome("s1", [0, 0]), lengths=((1, 1),) * 2, update=k
        )
        for k in (1, 2, 3)
    ]
    for of in batches[:2]:
        made(of)
    torch.save(made.state(), tmp_path / "state.pt")
    assert len(made.state()["turns"]["reward"]) == 6, "the capacity"
    again.load_state(torch.load(tmp_path / "state.pt", weights_only=True))
    one, two, fresh = (each(batches[2]) for each in (made, again, archer()))
    assert np.array_equal(one.advantages, two.advantages)
    assert one.metrics == two.metrics
    assert not np.array_equal(one.advantages, fresh.advantages)
    new = archer()
    new.load_state(archer().state())
    assert new.state() == {}


# The method -----------------------------------------------------------------------------------------------------------


def game() -> tuple[list[TrainingSample], list[GroupContext]]:
    """Return episodes of two turns of one token. The first turn decides, and the reward arrives after the second."""
    samples, members = [], []
    for number, first in enumerate((GOOD, BAD, GOOD, BAD)):
        second = 50 + number // 2
        path = [prompt([20, 21]), action([first], [-4.7]), prompt([30]), action([second], [-4.7])]
        samples.append(training_sample(f"s{number}", path))
        members.append(member(f"s{number}", {"r": float(first == GOOD)}))
    return samples, [group("g0", *members)]


@pytest.mark.row("S027")
def test_an_early_decisive_turn_has_an_advantage_although_the_reward_is_at_the_end() -> None:
    """With the discount 0.9, Q of the first turn is 0.9 or 0, V before it is 0.45, and the second turn changes
    nothing. The states are those of the reference, so the policy may move."""
    samples, groups = game()
    config = UpdateConfig(
        estimator=Extension("archer", {"warmup_updates": 8, "discount": 0.9, "tau": 0.3, "critic_lr": 5e-3}),
        loss=(LossTermChoice("ppo_clip"),),
        update_rule=minibatches(1),
        optimizer=OptimizerConfig(lr=1e-3, warmup_updates=0),
    )
    made = BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=7)
    before = [p.clone() for p in made.model.parameters()]
    for k in range(1, 9):
        made.update(k, samples, groups)
    assert all(torch.equal(old, new) for old, new in zip(before, made.model.parameters(), strict=True)), "warm-up"
    batch = batch_of(samples, groups, update=9)
    batch.table.columns.update(made._computed(batch.table, "reference"))
    estimator: Any = make_estimator(config.estimator)
    estimator.load_state(copy.deepcopy(made.memory()["plugins"]["estimator archer"]))
    advantages = estimator(batch).advantages.reshape(4, 2)
    assert advantages[:, 0] == pytest.approx([0.45, -0.45, 0.45, -0.45], abs=0.2)
    assert advantages[:, 1] == pytest.approx([0, 0, 0, 0], abs=0.2)
    states = batch["archer_states"].copy()
    for k in range(9, 12):
        made.update(k, samples, groups)
    assert not all(torch.equal(old, new) for old, new in zip(before, made.model.parameters(), strict=True))
    batch.table.columns.update(made._computed(batch.table, "reference"))
    assert np.array_equal(batch["archer_states"], states), "stored states do not age"


TURNS, EPISODES = 16, 8


def mean_skill(name: str, updates: int, **options: Any) -> float:
    """Return the mean probability of the right action after training exact policies by their gradients.

    An episode has 16 turns, each with a right action. The reward arrives after the last turn: the number of right
    actions. The policy has one logit per turn, and Adam trains it with the advantages of the estimator. The state of a
    turn is its number and the number of right actions before it.
    """
    made, rng = make_estimator(Extension(name, options)), np.random.default_rng(3)
    samples = [training_sample(f"s{n}", path_of(*[1] * TURNS)) for n in range(EPISODES)]
    members = [member(s.sample.sample_id, {"r": 0.0}, of=s) for s in samples]
    base = batch_of(samples, [group("g0", *members)])
    logits, first, second = np.full(TURNS, -1.0), np.zeros(TURNS), np.zeros(TURNS)
    for k in range(1, updates + 1):
        skill = 1 / (1 + np.exp(-logits))
        right = rng.random((EPISODES, TURNS)) < skill
        states = np.zeros((EPISODES, TURNS, 2, TURNS + 1), np.float32)
        states[:, range(TURNS), 0, range(TURNS)] = 1
        states[:, :, 0, TURNS] = right.cumsum(1) - right
        states[:, :, 1, 0] = right
        base.table.columns["archer_states"] = states.reshape(EPISODES * TURNS, -1)
        rewarded = [
            structs.replace(m, rewards=(Reward(name="r", value=float(r)),))
            for m, r in zip(members, right.sum(1), strict=True)
        ]
        advantages = made(replace(base, update=k, groups=(group("g0", *rewarded),))).advantages
        gradient = (advantages.reshape(EPISODES, TURNS) * (right - skill)).mean(0)
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        logits += 0.15 * first / (1 - 0.9**k) / (np.sqrt(second / (1 - 0.99**k)) + 1e-8)
    return float(skill.mean())


@pytest.mark.row("S027")
def test_a_late_reward_that_an_early_turn_decides_is_learned_faster_than_with_grpo() -> None:
    """The chance of a right action is 0.27 at first. Both see as many episodes, and `archer` waits for five updates."""
    grpo = mean_skill("grpo", 28)
    critic = mean_skill("archer", 28, warmup_updates=5, critic_steps=15, critic_lr=4e-3)
    assert critic > grpo + 0.08, (critic, grpo)


def test_modules_have_their_own_learning_rate() -> None:
    model, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.5, modules_factor=4.0), head)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25, 1.0, 1.0]
