"""Standard methods against values by hand, and against the formulas of verl, TRL and ROLL.

The formulas are stated here in plain torch, and were compared with verl b178a3c, TRL f2cd577, ROLL 8eb27cc and OpenRLHF
3c3be62. test_published_formulas.py has the losses, test_value_methods.py PPO and VAPO.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.mesh.config import MeshConfig
from rollmesh.shared.config.loader import config_from_dict
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import FinishReason, GroupContext, MemberOutcome, Outcome, TrainingSample
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.config import LossTermChoice, Normalization, OptimizerConfig, UpdateConfig
from rollmesh.trainer.estimators import Estimate, Estimator, make_estimator
from rollmesh.trainer.estimators.base import UNDECIDED
from rollmesh.trainer.losses import LossInputs, LossSum
from rollmesh.trainer.losses.base import LossTerm
from rollmesh.trainer.update import BatchTrainer

from .builders import action, batch_of, group, member, minibatches, prompt, random_batch, training_sample
from .gradient_check import check_gradient, plugins_of, ragged

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)


def estimator(name: str, **options: Any) -> Estimator:
    return make_estimator(Extension(name, options))


def of_length(sample_id: str, of: str, length: int, *, weight: float = 1.0) -> TrainingSample:
    path = [prompt([20]), action([21 + n % 40 for n in range(length)], [-1.0] * length)]
    return training_sample(sample_id, path, of=of, weight=weight)


def grouped(name: str, *members: tuple[float, int], episodes: str = "") -> tuple[list[TrainingSample], GroupContext]:
    """Return the samples of a group and the group, given reward and length of each. `episodes` names the episode of
    each sample by a letter."""
    samples, found = [], []
    for number, (reward, length) in enumerate(members):
        samples.append(of_length(f"{name}{number}", name, length))
        episode = f"{name}-{episodes[number]}" if episodes else ""
        found.append(member(f"{name}{number}", {"r": reward}, episode=episode, of=samples[-1]))
    return samples, group(name, *found)


def batch(*groups: tuple[list[TrainingSample], GroupContext], update: int = 1) -> UpdateBatch:
    return batch_of([s for samples, _ in groups for s in samples], [g for _, g in groups], update=update)


def per_sample(found: Estimate, of: UpdateBatch) -> list[float]:
    advantages = of.first(found.advantages)
    assert np.array_equal(found.advantages, of.per_token(advantages)), "one advantage per sample"
    return [float(a) for a in advantages]


def near_reference(of: UpdateBatch, *divergences: float) -> UpdateBatch:
    """Set log prox - log ref of the tokens of each sample."""
    reference = np.full(int(of.lengths.sum()), -2.0, np.float32)
    of.table.columns.update(reference=reference, proximal=reference + of.per_token(np.array(divergences)))
    return of


def failed(found: MemberOutcome) -> MemberOutcome:
    rewards = tuple(msgspec.structs.replace(r, outcome=Outcome.INFRA_FAILURE) for r in found.rewards)
    return msgspec.structs.replace(found, rewards=rewards)


# Edge cases of all of them --------------------------------------------------------------------------------------------

BY_GROUP = ("rloo", "opo", "gpg", "gated_length", "overlong", "adaptive_kl", "reinforce_plus_plus")


@pytest.mark.parametrize("name", BY_GROUP)
def test_groups_of_one_equal_rewards_failures_and_members_that_are_not_leased(name: str) -> None:
    """A lone member and equal rewards have no advantage in a method that compares members, a failed member is dropped
    and in no mean, and a member that is not leased is in the mean."""
    lone, equal = grouped("a", (1.0, 2)), grouped("b", (1.0, 2), (1.0, 2))
    samples, some = grouped("c", (1.0, 2), (0.0, 2), (0.5, 2))
    members = (some.members[0], some.members[1], failed(some.members[2]), member("elsewhere", {"r": 0.0}))
    of = near_reference(batch(lone, equal, (samples, msgspec.structs.replace(some, members=members))), *[0.0] * 6)
    made = estimator(name, **({"mean": "group"} if name in ("gated_length", "overlong", "adaptive_kl") else {}))
    found = made(of)
    assert found.dropped == {5: "UNSCORED"}
    assert np.isfinite(found.advantages).all()
    values = per_sample(found, of)
    if name != "reinforce_plus_plus":
        assert values[:3] == [0.0, 0.0, 0.0]
    assert values[3] > 0 > values[4]
    assert set(made.of_group(of.groups[2])) == {"c0", "c1", "elsewhere"}


@pytest.mark.parametrize("name", ["rloo", "opo", "gpg", "gated_length", "overlong"])
def test_two_samples_of_an_episode_count_once(name: str) -> None:
    """Rewards 1, 1 of one episode and 0, 0 of two others: the mean is 1 / 3, and without the own one 0 and 1 / 2."""
    options = {"std": "none"} if name in ("gated_length", "overlong") else {}
    of = batch(grouped("g", (1.0, 2), (1.0, 2), (0.0, 2), (0.0, 2), episodes="aabc"))
    expected = [1, 1, -0.5, -0.5] if name == "rloo" else [2 / 3, 2 / 3, -1 / 3, -1 / 3]
    if name == "gated_length":  # both right samples lose half of 0.1, and their episode counts once in the mean
        expected = [0.95 * 2 / 3, 0.95 * 2 / 3, -0.95 / 3, -0.95 / 3]
    assert per_sample(estimator(name, **options)(of), of) == pytest.approx(expected)


# RLOO -----------------------------------------------------------------------------------------------------------------


def test_rloo_equals_the_hand_computed_value() -> None:
    """Rewards 1, 0, 0.5: 1 - 0.25, 0 - 0.75, 0.5 - 0.5. Penalties of 0.1 per nat: 1 - 0.4, 0, 0.5 - 0.2 remain."""
    of = batch(grouped("g", (1.0, 2), (0.0, 2), (0.5, 1)))
    assert per_sample(estimator("rloo")(of), of) == pytest.approx([0.75, -0.75, 0.0])
    near_reference(of, 2.0, 0.0, 2.0)
    made = estimator("rloo", kl=0.1)
    found = made(of)
    assert per_sample(found, of) == pytest.approx([0.6 - 0.15, 0 - 0.45, 0.3 - 0.3])
    assert found.metrics["penalty_mean"] == pytest.approx(0.2)
    assert set(made.needs) == {"proximal", "reference"}
    assert not estimator("rloo").needs


def test_rloo_of_verl_and_trl() -> None:
    """`compute_rloo_outcome_advantage`: n / (n - 1) (R - mean); TRL: R - (sum - R) / (n - 1)."""
    rewards = torch.rand(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    of = batch(grouped("g", *((float(r), 1) for r in rewards)))
    found = per_sample(estimator("rloo")(of), of)
    assert found == pytest.approx((rewards * 7 / 6 - rewards.mean() * 7 / 6).tolist(), abs=1e-6)
    assert found == pytest.approx((rewards - (rewards.sum() - rewards) / 6).tolist(), abs=1e-6)


def test_the_penalty_keeps_groups_of_equal_rewards() -> None:
    _, same = grouped("g", (1.0, 2), (1.0, 2))
    assert set(estimator("rloo", kl=0.1).of_group(same).values()) == {1.0}
    assert set(estimator("rloo").of_group(same).values()) == {0.0}


# REINFORCE and REINFORCE++ --------------------------------------------------------------------------------------------


def test_reinforce_takes_the_reward_as_it_is() -> None:
    learner = config_from_dict(MeshConfig, {"recipe": "reinforce"}).learner
    of = batch(grouped("g", (1.0, 2), (0.0, 3)), grouped("h", (0.5, 1)))
    made = make_estimator(learner.estimator)
    assert per_sample(made(of), of) == [1.0, 0.0, 0.5]
    assert made.group_size.least == 1
    assert (learner.normalization, [t.name for t in learner.loss]) == (Normalization.CONSTANT, ["policy_gradient"])


def test_reinforce_plus_plus_equals_the_hand_computed_value() -> None:
    """Samples of 2 and 1 tokens with the rewards 1 and 0; log prox - log ref is 1 at the tokens of the first.

    With kl 0.25: returns 1 - 0.5, 1 - 0.25, 0; mean 1.25 / 3, variance of (0.5, 0.75, 0).
    """
    of = near_reference(batch(grouped("g", (1.0, 2), (0.0, 1))), 1.0, 0.0)
    found = estimator("reinforce_plus_plus", kl=0.25)(of)
    returns = np.array([0.5, 0.75, 0.0])
    assert found.advantages == pytest.approx((returns - 1.25 / 3) / np.sqrt(0.8125 / 3 - (1.25 / 3) ** 2))
    assert found.metrics["kl_mean"] == pytest.approx(2 / 3)


def verl_reinforce_plus_plus(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """`compute_reinforce_plus_plus_outcome_advantage`, with a population deviation."""
    returns, running = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in range(rewards.shape[1] - 1, -1, -1):
        running = rewards[:, t] + gamma * running
        returns[:, t] = running
        running = running * mask[:, t]
    inside = returns[mask > 0]
    return (inside - inside.mean()) / inside.std(correction=0)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_of_verl(gamma: float) -> None:
    lengths, outcomes = [3, 1, 6, 4], [1.0, 0.0, 0.5, 1.0]
    divergence = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(6) < torch.tensor(lengths)[:, None]).float()
    rewards = -0.1 * divergence * mask
    for row, (length, outcome) in enumerate(zip(lengths, outcomes, strict=True)):
        rewards[row, length - 1] += outcome
    of = batch(grouped("g", *zip(outcomes, lengths, strict=True)))
    zeros = np.zeros(sum(lengths), np.float32)
    of.table.columns.update(proximal=divergence[mask > 0].numpy(), reference=zeros)
    found = estimator("reinforce_plus_plus", kl=0.1, discount=gamma)(of)
    assert found.advantages == pytest.approx(verl_reinforce_plus_plus(rewards, mask, gamma).numpy(), abs=1e-5)


def test_the_baseline_of_reinforce_plus_plus_is_that_of_verl() -> None:
    """`compute_reinforce_plus_plus_baseline_outcome_advantage`: rewards minus the mean of their group, whitened over
    the tokens of the batch. Groups of rewards 1, 0 and 0.5, 0.4 with 2, 1, 1 and 4 tokens."""
    of = batch(grouped("g", (1.0, 2), (0.0, 1)), grouped("h", (0.5, 1), (0.4, 4)))
    centered = np.array([0.5, 0.5, -0.5, 0.05, -0.05, -0.05, -0.05, -0.05])
    made = estimator("reinforce_plus_plus", kl=0.0, baseline="group")
    assert made(of).advantages == pytest.approx((centered - centered.mean()) / centered.std(), abs=1e-6)
    assert made.of_group(of.groups[0]) == pytest.approx({"g0": 0.5, "g1": -0.5})
    assert made.group_size.least == 2
    assert not made.needs


def test_rewards_of_turns_are_in_the_baseline_of_the_group_and_keep_the_group() -> None:
    """Samples of one token with rewards of turns alone. Rewards 1 and 0 have the mean 0.5, and 3 and 2 the mean 2.5, so
    that the two groups have the same advantages."""
    samples: list[TrainingSample] = []
    groups: list[GroupContext] = []
    for name, values in (("g", (1.0, 0.0)), ("h", (3.0, 2.0))):
        mine, some = grouped(name, *((value, 1) for value in values))
        of_turns = [
            msgspec.structs.replace(m, rewards=tuple(msgspec.structs.replace(r, segment=1) for r in m.rewards))
            for m in some.members
        ]
        samples, groups = [*samples, *mine], [*groups, group(name, *of_turns)]
    of = batch_of(samples, groups)
    made = estimator("reinforce_plus_plus", kl=0.0, baseline="group")
    assert per_sample(made(of), of) == pytest.approx([1, -1, 1, -1], abs=1e-6)
    assert made.of_group(groups[1]) == pytest.approx({"h0": 0.5, "h1": -0.5})
    for name, options in (("reinforce_plus_plus", {"kl": 0.0}), ("gae", {})):
        assert estimator(name, **options).of_group(groups[0]) == {"g0": UNDECIDED, "g1": UNDECIDED}


# OPO and GPG ----------------------------------------------------------------------------------------------------------


def test_opo_equals_the_hand_computed_value() -> None:
    """Rewards 1, 0, 0.5 with 6, 2 and 4 tokens: the baseline is (6 + 2) / 12 = 2 / 3."""
    of = batch(grouped("g", (1.0, 6), (0.0, 2), (0.5, 4)))
    assert per_sample(estimator("opo")(of), of) == pytest.approx([1 / 3, -2 / 3, -1 / 6])


def test_the_baseline_of_opo_has_less_variance_than_the_mean_if_long_samples_have_large_gradients() -> None:
    """A sample of n tokens has a gradient of n independent directions. Right samples are long here, so that the mean
    as the baseline makes large gradients large. The variance is that of the sum over a group of 8."""
    rng = np.random.default_rng(0)
    squares = {"opo": 0.0, "gpg": 0.0}
    for _ in range(50):
        rewards = rng.integers(0, 2, 8).astype(float)
        lengths = np.where(rewards > 0, rng.integers(20, 40, 8), rng.integers(1, 5, 8))
        _, some = grouped("g", *zip(rewards.tolist(), lengths.tolist(), strict=True))
        for name in squares:
            advantages = np.array(list(estimator(name).of_group(some).values()))
            squares[name] += float(lengths @ np.square(advantages))
    assert squares["opo"] < 0.5 * squares["gpg"]


def test_members_without_a_summary_have_the_mean_length_in_opo() -> None:
    _, some = grouped("g", (1.0, 6), (0.0, 2))
    found = estimator("opo").of_group(group("g", *some.members, member("old", {"r": 0.0})))
    assert found == pytest.approx({"g0": 0.5, "g1": -0.5, "old": -0.5})
    assert estimator("opo").of_group(group("g", member("x", {"r": 1.0}), member("y", {"r": 0.0}))) == {
        "x": 0.5,
        "y": -0.5,
    }


def test_gpg_equals_the_hand_computed_value() -> None:
    """Three of 8 samples are of a group with signal, so alpha is 8 / 3; centered rewards are 2 / 3 and -1 / 3 twice."""
    of = batch(
        grouped("g", (1.0, 2), (0.0, 2), (0.0, 2)), grouped("h", (1.0, 2), (1.0, 2)), grouped("i", *[(0.0, 2)] * 3)
    )
    found = estimator("gpg")(of)
    assert per_sample(found, of) == pytest.approx([16 / 9, -8 / 9, -8 / 9, 0, 0, 0, 0, 0])
    assert found.metrics["alpha"] == pytest.approx(8 / 3)
    assert estimator("gpg")(batch(grouped("h", (1.0, 2), (1.0, 2)))).metrics["alpha"] == 1.0


def test_alpha_of_gpg_restores_the_gradient_of_a_batch_without_silent_groups() -> None:
    """The mean over the tokens of the batch, times alpha, is that over the tokens of the group with signal alone."""
    signal = grouped("g", (1.0, 2), (0.0, 2))
    alone, among = batch(signal), batch(signal, grouped("h", (1.0, 2), (1.0, 2)))
    means = [np.abs(estimator("gpg")(of).advantages).mean() for of in (alone, among)]
    assert means[0] == pytest.approx(means[1])


# GiGPO ----------------------------------------------------------------------------------------------------------------


def test_gigpo_adds_the_advantages_of_episode_and_step() -> None:
    """Two members of two turns with the rewards 1 and 0 at the end. The first turns have the same observation, the
    second ones different ones.

    Episode: 1 and -1. First step: discounted returns 0.95 and 0, so 1 and -1. Second step: alone, so 0.
    """
    samples, members = [], []
    for number, (reward, seen) in enumerate(((1.0, 30), (0.0, 31))):
        path = [prompt([20]), action([21], [-1.0]), prompt([seen]), action([22, 23], [-1.0, -1.0])]
        samples.append(training_sample(f"g{number}", path, of="g"))
        members.append(member(f"g{number}", {"r": reward}, of=samples[-1]))
    made = make_estimator(config_from_dict(MeshConfig, {"recipe": "gigpo"}).learner.estimator)
    found = made(batch_of(samples, [group("g", *members)]))
    assert found.advantages == pytest.approx([2, 1, 1, -2, -1, -1], abs=1e-4)
    heavier = estimator("hgpo", history=0, power=1.0, trajectory_term=True, average=False)
    found = heavier(batch_of(samples, [group("g", *members)]))
    assert found.advantages == pytest.approx([3, 1, 1, -3, -1, -1], abs=1e-4)


# Lengths: DAPO, and a penalty for right answers -----------------------------------------------------------------------


def test_the_soft_overlong_punishment_equals_the_hand_computed_value() -> None:
    """Limit 10, buffer 4: 6 tokens are free, 7 cost a quarter, 10 and more the whole weight of 2."""
    lengths = [2, 6, 7, 10, 14]
    of = batch(grouped("g", *((1.0, n) for n in lengths)))
    made = estimator("overlong", limit_tokens=10, buffer_tokens=4, overlong_weight=2.0, mean="none", std="none")
    assert per_sample(made(of), of) == pytest.approx([1, 1, 0.5, -1, -1])
    with pytest.raises(ConfigError, match="`buffer_tokens` must be <= limit_tokens = 10, got 11"):
        estimator("overlong", limit_tokens=10, buffer_tokens=11)


def test_the_punishment_of_verl_and_trl() -> None:
    """verl's reward manager `dapo`: min(-exceed / buffer * factor, 0), for responses up to the limit."""
    lengths = np.arange(1, 21)
    of = batch(grouped("g", *((0.0, int(n)) for n in lengths)))
    made = estimator("overlong", limit_tokens=20, buffer_tokens=8, mean="none", std="none")
    expected = np.minimum(-(lengths - (20 - 8)) / 8 * 1.0, 0)
    assert per_sample(made(of), of) == pytest.approx(expected.tolist())


def test_groups_are_filtered_by_their_rewards_without_the_punishment() -> None:
    _, same = grouped("g", (1.0, 2), (1.0, 10))
    made = estimator("overlong", limit_tokens=10, buffer_tokens=4)
    assert set(made.of_group(same).values()) == {0.0}
    assert per_sample(made(of := batch(grouped("g", (1.0, 2), (1.0, 10)))), of) == pytest.approx([1, -1], abs=1e-4)


def test_the_recipe_dapo_has_all_of_its_parts() -> None:
    """Dynamic sampling, clip-higher, mean over tokens, soft overlong punishment, overlong filtering, no KL term."""
    found = config_from_dict(MeshConfig, {"recipe": "dapo"})
    learner = found.learner
    assert found.reward.finalizers[0].name == "zero_variance"
    (term,) = learner.loss
    assert (term.name, term.options) == ("ppo_clip", {"clip_low": 0.2, "clip_high": 0.28})
    assert learner.normalization is Normalization.TOKEN
    options = {**learner.estimator.options, "limit_tokens": 10, "buffer_tokens": 4}
    made = estimator(learner.estimator.name, **options)
    samples, some = grouped("g", (1.0, 2), (0.0, 2), (0.0, 10))
    cut = replace_finish(samples[2], FinishReason.LENGTH)
    of = batch_of([*samples[:2], cut], [some])
    found_estimate = made(of)
    assert found_estimate.dropped == {2: "TRUNCATED"}
    sums = np.array([1.0, 0.0, -0.5])
    expected = (sums - sums.mean()) / sums.std()
    assert per_sample(found_estimate, of)[:2] == pytest.approx(expected[:2].tolist(), abs=1e-4)


def replace_finish(of: TrainingSample, finish: FinishReason) -> TrainingSample:
    """Return the sample whose last action ended for another reason."""
    last = msgspec.structs.replace(of.segments[-1], finish=finish)
    sample = msgspec.structs.replace(of.sample, finish=finish)
    return msgspec.structs.replace(of, segments=(*of.segments[:-1], last), sample=sample)


def test_only_right_answers_pay_for_their_length() -> None:
    """Right answers of 2 and 6 tokens: z = -1 and 1, so 0.2 times sigmoid is 0.0538 and 0.1462. The long wrong answer
    keeps its reward."""
    of = batch(grouped("g", (1.0, 2), (1.0, 6), (0.0, 40)))
    made = estimator("gated_length", length_weight=0.2, mean="none", std="none")
    low, high = 0.2 / (1 + np.e), 0.2 / (1 + 1 / np.e)
    assert per_sample(made(of), of) == pytest.approx([1 - low, 1 - high, 0], abs=1e-5)
    same = grouped("h", (1.0, 3), (1.0, 5))[1]
    first, second = estimator("gated_length", std="none").of_group(same).values()
    assert first == pytest.approx(-second)
    assert first > 0, "of two right answers the shorter one is better, so that the group is kept"
    wrong = grouped("w", (0.0, 3), (0.0, 5))[1]
    assert set(estimator("gated_length").of_group(wrong).values()) == {0.0}


def test_a_right_answer_of_any_length_is_better_than_a_wrong_one() -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        rewards = rng.integers(0, 2, 6).astype(float).tolist()
        _, some = grouped("g", *zip(rewards, rng.integers(1, 500, 6).tolist(), strict=True))
        found = list(estimator("gated_length", length_weight=0.4).of_group(some).values())
        right = [a for a, r in zip(found, rewards, strict=True) if r]
        wrong = [a for a, r in zip(found, rewards, strict=True) if not r]
        assert min(right, default=1.0) > max(wrong, default=-1.0)


# Adaptive coefficients ------------------------------------------------------------------------------------------------


def test_the_coefficient_of_the_divergence_follows_the_target() -> None:
    """Two samples with the mean divergences 0.3 and 0.1: KL = 0.2 is twice the target, so the error is limited to 0.2,
    and c grows by 0.2 * 2 / 4 = 0.1. Then KL = 0.09: the error is -0.1, and c falls by 0.05."""
    options = {"coefficient": 0.5, "target": 0.1, "horizon": 4, "std": "none"}
    made = estimator("adaptive_kl", **options)
    of = near_reference(batch(grouped("g", (1.0, 2), (0.0, 1))), 0.3, 0.1)
    first = made(of)
    assert per_sample(first, of) == pytest.approx([(1 - 0.3 + 0.05) / 2, -(1 - 0.3 + 0.05) / 2], abs=1e-6)
    assert first.metrics["coefficient"] == 0.5
    assert made.state() == {"coefficient": pytest.approx(0.55)}
    again = made(replace(of, repeat=1))
    assert (again.metrics["coefficient"], made.state()["coefficient"]) == (0.5, pytest.approx(0.55)), "counted once"
    near = near_reference(batch(grouped("g", (1.0, 2), (0.0, 1))), 0.09, 0.09)
    assert made(near).metrics["coefficient"] == pytest.approx(0.55)
    assert made.state()["coefficient"] == pytest.approx(0.55 * 0.95)
    resumed = estimator("adaptive_kl", **options)
    resumed.load_state(made.state())
    assert resumed(near).metrics["coefficient"] == made.state()["coefficient"]


@pytest.mark.parametrize(("divergence", "samples"), [(0.05, 2), (0.5, 6), (0.11, 3)])
def test_the_controller_of_verl(divergence: float, samples: int) -> None:
    """`AdaptiveKLController.update(current_kl, n_steps)`."""
    made = estimator("adaptive_kl", coefficient=0.2, target=0.1, horizon=100)
    of = near_reference(batch(grouped("g", *[(1.0, 2)] * samples)), *[divergence] * samples)
    made(of)
    error = np.clip(divergence / 0.1 - 1, -0.2, 0.2)
    assert made.state()["coefficient"] == pytest.approx(0.2 * (1 + error * samples / 100), rel=1e-5)


def test_a_constant_coefficient_has_no_memory() -> None:
    """The recipe grpo_kl_reward keeps the checkpoints that it had."""
    with pytest.raises(NotImplementedError):
        estimator("kl_reward").state()


def entropy_term(**options: Any) -> LossTerm:
    return LossSum([LossTermChoice("entropy_target", options)]).terms["entropy_target"]


def trl_entropy(entropies: Sequence[float], target: float, delta: float, most: float) -> list[tuple[float, float]]:
    """`use_adaptive_entropy`: applied and next coefficient after each optimizer step with these entropies."""
    coefficient, last = 0.0, float("inf")
    found = []
    for entropy in entropies:
        applied = coefficient if last <= target else 0.0
        coefficient = min(coefficient + delta, most) if entropy <= target else max(coefficient - delta, 0.0)
        last = entropy
        found.append((applied, coefficient))
    return found


def test_the_entropy_coefficient_follows_the_target() -> None:
    """Entropies below, below, above, below, below the target of 1 nat, each step in two micro-batches of unequal size,
    against the rule of TRL."""
    term: Any = entropy_term(target=1.0, step=0.25, coefficient_max=0.5)
    entropies = [0.5, 0.25, 2.0, 0.75, 0.5, 0.5]
    for entropy, (applied, coefficient) in zip(entropies, trl_entropy(entropies, 1.0, 0.25, 0.5), strict=True):
        total, values = 0.0, torch.tensor([0.0, 0.0, 3 * entropy])
        for part in (values[:1], values[1:]):
            weight = torch.full_like(part, 1 / 3)
            inputs = entropy_inputs(part.clone().requires_grad_(), weight)
            loss, stats = term(inputs)
            assert loss.requires_grad
            assert stats["coefficient"].tolist() == pytest.approx([applied] * len(part))
            total += loss.item()
        assert total == pytest.approx(-applied * entropy)
        term.exchange(list)
        assert term.coefficient == pytest.approx(coefficient)
    state = copy.deepcopy(term.state())
    assert state == {"coefficient": pytest.approx(0.5), "entropy": pytest.approx(0.5)}
    resumed: Any = entropy_term(target=1.0, step=0.25)
    resumed.load_state(state)
    assert (resumed.coefficient, resumed.entropy) == (term.coefficient, term.entropy)
    with pytest.raises(ConfigError, match=r"`coefficient` must be in \[coefficient_min, coefficient_max\]"):
        entropy_term(coefficient=2.0)


def entropy_inputs(entropy: torch.Tensor, weight: torch.Tensor) -> LossInputs:
    return LossInputs(torch.zeros_like(entropy), {"entropy_target": entropy, "token_weight": weight})


def test_the_gradient_of_the_bonus_equals_finite_differences() -> None:
    plugins = plugins_of(LossTermChoice("entropy_target", {"target": 5.0, "coefficient": 0.3}))
    term: Any = plugins.loss.terms["entropy_target"]
    term.entropy = 0.5
    gradient = check_gradient(plugins, ragged())
    assert float(gradient.abs().max()) > 0


def test_the_coefficient_rises_in_updates_and_continues_from_a_checkpoint() -> None:
    """The untrained model has an entropy of about log 112 = 4.7 nats per token: below a target of 6, so that every
    optimizer step adds 0.1."""
    config = UpdateConfig(
        loss=(LossTermChoice("ppo_clip"), LossTermChoice("entropy_target", {"target": 6.0, "step": 0.1})),
        update_rule=minibatches(2),
        optimizer=OptimizerConfig(lr=1e-4, warmup_updates=0),
    )
    made, again = (BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=7) for _ in range(2))
    samples, groups = random_batch(2, 2)
    result = made.update(1, samples, groups)
    term: Any = made.plugins.loss.terms["entropy_target"]
    assert term.coefficient == pytest.approx(0.2)
    assert result.metrics["entropy_target/coefficient_share"] == pytest.approx(0.05, abs=0.03), (
        "0 and 0.1 in the two steps"
    )
    again.load_memory(copy.deepcopy(made.memory()))
    again.model.load_state_dict(made.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(made.optimizer.state_dict()))
    again.step = 1
    results = [each.update(2, samples, groups).metrics for each in (made, again)]
    assert results[0] == results[1]
    assert results[0]["entropy_target/coefficient_share"] > 0.2
