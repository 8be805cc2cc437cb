"""PPO and VAPO: generalized advantage estimation by hand and against the loop of verl, and the critic."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, Outcome, Reward, TrainingSample
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.config import LossTermChoice, OptimizerConfig, UpdateConfig
from rollmesh.trainer.estimators import Estimate, make_estimator
from rollmesh.trainer.losses import LossInputs
from rollmesh.trainer.update import BatchTrainer

from .builders import action, batch_of, group, member, minibatches, prompt, training_sample
from .gradient_check import plugins_of, ragged

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)


def sample(sample_id: str, of: str, *turns: int, weight: float = 1.0) -> TrainingSample:
    """Return a sample with turns of these numbers of tokens, and an observation of one token between them."""
    path = [prompt([20])]
    for number, length in enumerate(turns):
        path += [prompt([30 + number])] if number else []
        path += [action([21 + n for n in range(length)], [-1.0] * length)]
    return training_sample(sample_id, path, of=of, weight=weight)


def batch(*samples: tuple[TrainingSample, float], update: int = 1) -> UpdateBatch:
    """Return a batch of samples with their rewards."""
    names = dict.fromkeys(s.group for s, _ in samples)
    groups = [
        group(name, *(member(s.sample.sample_id, {"r": r}, of=s) for s, r in samples if s.group == name))
        for name in names
    ]
    return with_rewards(batch_of([s for s, _ in samples], groups, update=update), [r for _, r in samples])


def with_rewards(of: UpdateBatch, rewards: Sequence[float]) -> UpdateBatch:
    of.table.columns["reward"] = of.per_token(np.array(rewards))
    return of


def estimate(of: UpdateBatch, values: Sequence[float], **options: Any) -> Estimate:
    of.table.columns["values"] = np.array(values, np.float32)
    found: Estimate = make_estimator(Extension("gae", options))(of)
    return found


# Generalized advantage estimation -------------------------------------------------------------------------------------


def test_gae_equals_the_hand_computed_value() -> None:
    """Three tokens with V = 0.5, 0.2, 0.4 and the reward 1 after the last; discount and both lambdas 0.5.

    delta = 0.5 * 0.2 - 0.5, 0.5 * 0.4 - 0.2, 1 - 0.4 = -0.4, 0, 0.6, and A = delta + 0.25 * (A of the next token).
    """
    of = batch((sample("s", "g", 3), 1.0))
    found = estimate(of, [0.5, 0.2, 0.4], discount=0.5, lambda_policy=0.5, lambda_critic=0.5, whiten=False)
    assert found.advantages == pytest.approx([-0.3625, 0.15, 0.6])
    assert found.columns["returns"] == pytest.approx([0.1375, 0.35, 1.0])
    assert found.columns["positive"].tolist() == [1, 1, 1]


def test_the_lambdas_of_critic_and_policy_are_independent() -> None:
    """With lambda 1 the target of the critic is the discounted reward, and with lambda 0 an advantage is its own
    delta."""
    of = batch((sample("s", "g", 3), 1.0))
    found = estimate(of, [0.5, 0.2, 0.4], discount=0.5, lambda_policy=0.0, lambda_critic=1.0, whiten=False)
    assert found.advantages == pytest.approx([-0.4, 0.0, 0.6])
    assert found.columns["returns"] == pytest.approx([0.25, 0.5, 1.0])


def test_lambda_adapts_to_the_length() -> None:
    """length_alpha 0.25: lambda is 1 - 1 / (0.25 * 8) = 0.5 for 8 tokens, and 0 for 3 tokens."""
    of = batch((sample("a", "g", 8), 1.0), (sample("b", "g", 3), 1.0))
    found = estimate(of, [0.0] * 11, length_alpha=0.25, whiten=False)
    assert found.advantages == pytest.approx([0.5**n for n in range(7, -1, -1)] + [0, 0, 1])


def verl_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float, whiten: bool
) -> tuple[Tensor, Tensor]:
    """The formula of `compute_gae_advantage_return` (verl b178a3c) over [B, T], with a population deviation: tokens
    with mask 0 pass the next value and the sum on."""
    advantages = torch.zeros_like(values)
    after, total = torch.zeros(len(values)), torch.zeros(len(values))
    for t in range(values.shape[1] - 1, -1, -1):
        at = mask[:, t] > 0
        delta = rewards[:, t] + gamma * after - values[:, t]
        total = torch.where(at, delta + gamma * lam * total, total)
        after = torch.where(at, values[:, t], after)
        advantages[:, t] = total
    returns = advantages + values
    if whiten:
        inside = advantages[mask > 0]
        advantages = (advantages - inside.mean()) / inside.std(correction=0)
    return advantages, returns


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7)])
def test_gae_of_verl(gamma: float, lam: float) -> None:
    """On samples of several turns with observations between them."""
    rng = torch.Generator().manual_seed(3)
    turns = [(3, 4), (1,), (2, 1, 5), (6,)]
    rewards = [1.0, 0.0, 0.5, -1.0]
    mask = torch.zeros(4, 12)
    for row, lengths in enumerate(turns):
        start = 0
        for length in lengths:
            mask[row, start : start + length] = 1
            start += length + 1
    values = torch.randn(4, 12, generator=rng)
    given = torch.zeros(4, 12)
    for row, reward in enumerate(rewards):
        given[row, int(mask[row].nonzero().max())] = reward
    expected = verl_gae(given, values, mask, gamma, lam, whiten=True)
    of = batch(*((sample(f"s{n}", "g", *lengths), rewards[n]) for n, lengths in enumerate(turns)))
    found = estimate(of, values[mask > 0].tolist(), discount=gamma, lambda_policy=lam, lambda_critic=lam)
    assert found.advantages == pytest.approx(expected[0][mask > 0].numpy(), abs=1e-5)
    assert found.columns["returns"] == pytest.approx(expected[1][mask > 0].numpy(), abs=1e-5)


def test_rewards_of_turns_are_those_of_their_last_tokens() -> None:
    """Turns of 2 and 1 tokens with the rewards 0.25 and 0.5, and 1 for the whole sample."""
    made = sample("s", "g", 2, 1)
    rewarded = replace(
        member("s", {"r": 1.0}, of=made),
        rewards=(
            Reward(name="r", value=1.0, outcome=Outcome.OK),
            Reward(name="t", value=0.25, outcome=Outcome.OK, segment=1),
            Reward(name="t", value=0.5, outcome=Outcome.OK, segment=3),
        ),
    )
    of = with_rewards(batch_of([made], [group("g", rewarded)]), [1.0])
    assert estimate(of, [0, 0, 0], whiten=False).advantages == pytest.approx([1.75, 1.75, 1.5])


def test_a_member_without_a_summary_has_its_reward_at_the_last_token() -> None:
    made = sample("s", "g", 2, 2)
    of = with_rewards(batch_of([made], [group("g", member("s", {"r": 1.0}))]), [1.0])
    assert estimate(of, [0, 0, 0, 0], lambda_policy=0.0, whiten=False).advantages.tolist() == [0, 0, 0, 1]


def test_the_divergence_from_the_reference_costs_reward_from_its_token_on() -> None:
    of = batch((sample("s", "g", 3), 1.0))
    of.table.columns.update(proximal=np.array([-1.0, -1, -1]), reference=np.array([-1.0, -3, -2]))
    found = estimate(of, [0, 0, 0], kl=0.1, whiten=False)
    assert found.advantages == pytest.approx([1 - 0.3, 1 - 0.3, 1 - 0.1])
    assert found.metrics["kl_mean"] == pytest.approx(1.0)
    assert set(make_estimator(Extension("gae", {"kl": 0.1})).needs) == {"values", "proximal", "reference"}
    assert make_estimator("gae").needs == ("values",)


def test_groups_of_one_failures_and_members_that_are_not_leased() -> None:
    """A failed member is dropped and not in the mean. Members that are not leased have no tokens. A group of one and
    a group of equal rewards have advantages."""
    samples = [sample("a", "g", 2), sample("b", "g", 2), sample("c", "h", 1)]
    groups = [
        group(
            "g",
            member("a", {"r": 1.0}, of=samples[0]),
            member("b", {"r": 1.0}, outcome=Outcome.INFRA_FAILURE, of=samples[1]),
            member("elsewhere", {"r": 0.0}),
        ),
        group("h", member("c", {"r": 0.25}, of=samples[2])),
    ]
    of = with_rewards(batch_of(samples, groups), [1.0, 0.0, 0.25])
    found = estimate(of, [0.0] * 5)
    assert found.dropped == {1: "UNSCORED"}
    mean, deviation = 0.75, np.sqrt((2 * 0.25**2 + 0.5**2) / 3)
    assert found.advantages == pytest.approx([0.25 / deviation] * 2 + [0, 0] + [(0.25 - mean) / deviation])
    estimator = make_estimator("gae")
    assert estimator.of_group(groups[0]) == {"a": 1.0, "elsewhere": 1.0}, "every group is kept"
    nothing = with_rewards(batch_of(samples[:1], [group("g", member("a", {}))]), [0.0])
    assert estimate(nothing, [0.0, 0.0]).advantages.tolist() == [0, 0]


def test_two_samples_of_an_episode_count_once_in_the_whitening() -> None:
    """Samples of weight 0.5 and reward 1 beside one of weight 1 and reward 0: the mean is 0.5."""
    of = batch(
        (sample("a", "g", 1, weight=0.5), 1.0), (sample("b", "g", 1, weight=0.5), 1.0), (sample("c", "g", 1), 0.0)
    )
    assert estimate(of, [0, 0, 0]).advantages == pytest.approx([1, 1, -1])


def test_explained_variance_is_one_for_a_perfect_critic() -> None:
    of = batch((sample("a", "g", 2), 1.0), (sample("b", "g", 2), 0.0))
    assert estimate(of, [1, 1, 0, 0]).metrics["explained_variance"] == pytest.approx(1.0)
    assert estimate(of, [0, 0, 0, 0]).metrics["explained_variance"] == pytest.approx(0.0)
    same = batch((sample("a", "g", 2), 1.0))
    assert estimate(same, [0, 0]).metrics["explained_variance"] == 0.0


def test_the_language_model_loss_is_over_the_positive_tokens_alone() -> None:
    """Samples of 3, 1 and 2 tokens with the rewards 1, 0 and 1: the loss is the mean of -log pi over 5 tokens."""
    rng = torch.Generator().manual_seed(1)
    of = batch((sample("a", "g", 3), 1.0), (sample("b", "g", 1), 0.0), (sample("c", "g", 2), 1.0))
    positive = torch.as_tensor(estimate(of, [0.0] * 6).columns["positive"])
    assert positive.tolist() == [1, 1, 1, 0, 1, 1]
    logprobs = torch.randn(6, generator=rng, requires_grad=True)
    columns = {
        "positive": positive,
        "token_weight": torch.full((6,), 1 / 6),
        "source": torch.as_tensor(of["source"]),
        "behavior": torch.zeros(6),
        "sample": torch.as_tensor(of["sample"]),
    }
    loss = plugins_of(LossTermChoice("positive_lm")).loss
    columns |= loss.prepare(columns)
    found, _ = loss(LossInputs(logprobs, columns))
    expected = -logprobs[positive > 0].sum() / 5
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(value, logprobs)[0] for value in (found, expected))
    torch.testing.assert_close(*gradients)
    nothing = columns | loss.prepare(columns | {"positive": torch.zeros(6)})
    assert loss(LossInputs(logprobs, nothing))[0].item() == 0.0


# The critic -----------------------------------------------------------------------------------------------------------


def test_the_value_loss_equals_the_hand_computed_value() -> None:
    """V = 0.5 at all tokens by the bias, clip 0.2. Returns 1, 1, 0 and values at the start 0, 0.4, 0.

    Clipped values are 0.2, 0.5, 0.2: the errors are max(0.25, 0.64), 0.25 and max(0.25, 0.04), each halved.
    """
    plugins = plugins_of(LossTermChoice("value", {"clip": 0.2}))
    head: Any = plugins.make_modules(lambda: 4, seed=0)["value"]
    torch.nn.init.constant_(head[2].bias, 0.5)
    columns = {
        "returns": torch.tensor([1.0, 1.0, 0.0]),
        "values": torch.tensor([0.0, 0.4, 0.0]),
        "token_weight": torch.tensor([0.5, 0.25, 0.25]),
    }
    hidden = torch.randn(3, 4, requires_grad=True)
    loss, stats = plugins.loss(LossInputs(torch.zeros(3), columns, hidden))
    assert loss.item() == pytest.approx(0.5 * 0.32 + 0.25 * 0.125 + 0.25 * 0.125)
    assert stats["value_clipped"].tolist() == [1, 0, 0]
    loss.backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is None, "the policy is not changed"
    # the clipped token has no gradient: 0.25 * (0.5 - 1) + 0.25 * (0.5 - 0) = 0
    assert head[2].bias.grad.item() == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_the_value_loss_of_verl(clip: float) -> None:
    """`compute_value_loss`: value and gradient by the values, on a mean over tokens."""
    rng = torch.Generator().manual_seed(5)
    of = ragged()
    plugins = plugins_of(LossTermChoice("value", {"clip": clip, "through": True}))
    head: Any = plugins.make_modules(lambda: 4, seed=0)["value"]
    torch.nn.init.normal_(head[2].weight, generator=rng)
    hidden = of.hidden.float().requires_grad_()
    count = len(hidden)
    columns = {
        "returns": torch.randn(count, generator=rng),
        "values": head(hidden).squeeze(-1).detach() + 0.5 * torch.randn(count, generator=rng),
        "token_weight": torch.full((count,), 1 / count),
    }
    found, _ = plugins.loss(LossInputs(torch.zeros(count), columns, hidden))
    new = head(hidden).squeeze(-1)
    expected = (new - columns["returns"]) ** 2
    if clip:
        bounded = torch.min(torch.max(new, columns["values"] - clip), columns["values"] + clip)
        expected = torch.max(expected, (bounded - columns["returns"]) ** 2)
        assert bool((bounded != new).any())
    expected = 0.5 * expected.mean()
    torch.testing.assert_close(found, expected)
    parameters = [*head.parameters(), hidden]
    for mine, theirs in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def game() -> tuple[list[TrainingSample], list[GroupContext]]:
    """Return four samples of two tokens. The first token decides the reward."""
    samples, members = [], []
    for number, first in enumerate((40, 41, 40, 41)):
        path = [prompt([20, 21]), action([first, 50 + number // 2], [-4.7, -4.7])]
        samples.append(training_sample(f"s{number}", path))
        members.append(member(f"s{number}", {"r": float(first == 40)}))
    return samples, [group("g0", *members)]


def trainer(pretraining_updates: int, *terms: LossTermChoice) -> BatchTrainer:
    config = UpdateConfig(
        estimator=Extension("gae", {"pretraining_updates": pretraining_updates}),
        loss=(LossTermChoice("ppo_clip"), LossTermChoice("value"), *terms),
        update_rule=minibatches(1),
        optimizer=OptimizerConfig(lr=1e-3, modules_factor=10.0, warmup_updates=0),
    )
    return BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=7)


def weights_of(made: BatchTrainer) -> list[NDArray[Any]]:
    return [p.detach().numpy().copy() for p in made.model.parameters()]


def test_in_the_pretraining_the_critic_learns_and_the_policy_does_not() -> None:
    """Before the first token V is 0.5, and after it the reward is decided: V explains half of the variance of the
    returns at both tokens together, all of it at the second one."""
    samples, groups = game()
    made = trainer(30, LossTermChoice("positive_lm", weight=0.1))
    before = weights_of(made)
    for k in range(1, 31):
        result = made.update(k, samples, groups)
    assert all(np.array_equal(old, new) for old, new in zip(before, weights_of(made), strict=True))
    assert result.metrics["estimator/explained_variance"] == pytest.approx(0.5, abs=0.1)
    assert result.metrics["estimator/pretraining"] == 1.0
    made.update(31, samples, groups)
    assert not all(np.array_equal(old, new) for old, new in zip(before, weights_of(made), strict=True))


def test_a_resumed_run_continues_with_the_critic_bit_for_bit() -> None:
    samples, groups = game()
    made, again = trainer(0), trainer(0)
    for k in range(1, 3):
        made.update(k, samples, groups)
    again.load_memory(copy.deepcopy(made.memory()))
    again.model.load_state_dict(made.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    again.step = 2
    results = [each.update(3, samples, groups) for each in (made, again)]
    assert results[0].metrics == results[1].metrics
    assert all(np.array_equal(a, b) for a, b in zip(weights_of(made), weights_of(again), strict=True))
