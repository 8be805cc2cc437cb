"""Estimators that change rewards before the advantages of GRPO, or filter these advantages, against values by hand."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rollmesh.shared.domain.trajectory import FinishReason, Outcome, TrainingSample
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.estimators.base import UNDECIDED
from rollmesh.trainer.estimators.campo import CampoOptions, loop_of
from rollmesh.trainer.estimators.kl_reward import KlReward
from rollmesh.trainer.estimators.truncation import is_truncated, loop_share, prefix_matches

from .builders import action, batch_of, group, member, prompt, training_sample
from .test_methods import batch, estimator, per_sample, rewarded, scalars, with_columns

# The divergence in the reward -----------------------------------------------------------------------------------------


def test_kl_in_the_reward_equals_the_hand_computed_value() -> None:
    """Two tokens each with d = 0.5, 0.5 and -1, 2: sums 1 and 1. With coefficient 0.2: 1 - 0.2 and 0 - 0.2; k2 gives
    0.25 and 2.5."""
    of = batch(rewarded("a", 1.0, 0.0))
    with_columns(of, proximal=[-1, -1, -2, -1], reference=[-1.5, -1.5, -1, -3])
    plain: dict[str, Any] = {"mean": "none", "std": "none", "coefficient": 0.2}
    found = estimator("kl_reward", **plain)(of)
    assert per_sample(found, of) == pytest.approx([0.8, -0.2])
    assert found.metrics == pytest.approx({"kl_mean": 0.5, "penalty_mean": 0.2})
    assert scalars(estimator("kl_reward", kind="k2", **plain), of) == pytest.approx([0.95, -0.5])
    k3 = [2 * (math.exp(-0.5) - 0.5), (math.e - 2) + (math.exp(-2) + 1)]
    assert scalars(estimator("kl_reward", kind="k3", **plain), of) == pytest.approx([1 - 0.2 * k3[0], -0.2 * k3[1]])
    centered = scalars(estimator("kl_reward", std="none", coefficient=0.2), of)
    assert centered == pytest.approx([0.5, -0.5]), "equal penalties do not matter in a group"


def test_a_member_that_is_not_leased_has_the_mean_penalty() -> None:
    context = rewarded("a", 1.0, 0.0, 0.0)
    everyone = batch(context)
    of = batch_of(everyone.samples[:2], [context])
    with_columns(of, proximal=[-1] * 4, reference=[-2, -2, -1, -1])
    # penalties 0.2, 0 and their mean 0.1: rewards 0.8, 0, -0.1 with the mean 0.7 / 3
    found = scalars(estimator("kl_reward", std="none", coefficient=0.1), of)
    assert found == pytest.approx([0.8 - 0.7 / 3, -0.7 / 3])


def test_a_group_with_equal_rewards_is_kept_for_its_penalties() -> None:
    made = estimator("kl_reward")
    assert made.of_group(rewarded("a", 1.0, 1.0)) == {"a0": UNDECIDED, "a1": UNDECIDED}
    assert made.of_group(rewarded("a", 1.0)) == {"a0": 0.0}
    assert made.of_group(rewarded("a", 1.0, 0.0)) == estimator("grpo").of_group(rewarded("a", 1.0, 0.0))


def test_the_reward_has_the_gradient_of_the_divergence_of_samples_and_k2_that_of_tokens() -> None:
    """Exact, over all samples of two tokens from three words, where the second distribution depends on the first
    token."""
    rng = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(4, 3, generator=rng, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    paths = list(itertools.product(range(3), repeat=2))

    def logprobs(table: torch.Tensor) -> torch.Tensor:
        each = table.log_softmax(-1)
        return torch.stack([torch.stack([each[0, a], each[1 + a, b]]) for a, b in paths])

    pi, q = logprobs(logits), logprobs(other)
    probability = pi.detach().sum(-1).exp()
    divergence = (pi.sum(-1).exp() * (pi - q).sum(-1)).sum()
    of = batch(rewarded("a", *[0.0] * 9))
    with_columns(of, proximal=pi.detach().flatten().tolist(), reference=q.flatten().tolist())
    advantages = scalars(estimator("kl_reward", mean="none", std="none", coefficient=1.0), of)
    surrogate = -(probability * torch.tensor(advantages) * pi.sum(-1)).sum()
    k2 = (probability[:, None] * (pi - q).square() / 2).sum()
    exact, reward, loss = (torch.autograd.grad(v, logits, retain_graph=True)[0] for v in (divergence, surrogate, k2))
    torch.testing.assert_close(reward, exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss[1:], exact[1:], rtol=1e-5, atol=1e-6)
    assert (loss[0] - exact[0]).abs().max() > 0.01, "the first token also decides the divergence of the second"


# StableReinforce ------------------------------------------------------------------------------------------------------


@pytest.mark.row("S032")
def test_stable_reinforce_sets_outliers_to_zero() -> None:
    """One of 16 rewards is 16 and the others are 0: mean 1, deviation sqrt(15), z = 15 / sqrt(15) = 3.87 and -1 /
    sqrt(15) = -0.26."""
    of = batch(*(rewarded(f"g{n}", *([16.0] if n == 0 else [0.0]), *[0.0] * 3) for n in range(4)))
    found = estimator("stable_reinforce")(of)
    advantages = per_sample(found, of)
    assert advantages[0] == 0.0
    assert advantages[1:] == pytest.approx([-1 / math.sqrt(15)] * 15, rel=1e-5)
    assert found.metrics == pytest.approx({"outliers": 1, "advantage_max": math.sqrt(15)})
    assert scalars(estimator("stable_reinforce", sigma_max=4.0), of)[0] == pytest.approx(math.sqrt(15), rel=1e-5)
    assert scalars(estimator("grpo", mean="batch", std="batch"), of)[0] == pytest.approx(math.sqrt(15), rel=1e-5)


def test_ten_episodes_have_no_outlier() -> None:
    """The largest z-score of n episodes is (n - 1) / sqrt(n): 2.85 for 10, 3.02 for 11."""
    for n, outliers in ((10, 0), (11, 1)):
        assert (
            estimator("stable_reinforce")(batch(rewarded("g", 1.0, *[0.0] * (n - 1)))).metrics["outliers"] == outliers
        )


# CAMPO ----------------------------------------------------------------------------------------------------------------


def looping(share: float, length: int = 120) -> list[int]:
    """Return tokens that repeat (1, 2, 3) from a place on, so that the loop is this share of them."""
    before = length - round(share * length)
    return [*range(100, 100 + before), *([1, 2, 3] * length)[: length - before]]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_share_of_a_loop(share: float) -> None:
    assert loop_share(looping(share), 2) == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "repeats", "share"),
    [
        ("abcabc", 2, 1.0),
        ("abcab", 2, 0.0),
        ("xabcabcab", 2, 8 / 9),
        ("xabcabcab", 3, 0.0),
        ("abab-c", 2, 0.0),
        ("abccc", 2, 3 / 5),
        ("abccc", 4, 0.0),
        ("a", 2, 0.0),
        ("", 2, 0.0),
        ("aabaab", 2, 1.0),
    ],
)
def test_a_loop_is_the_longest_suffix_that_repeats(text: str, repeats: int, share: float) -> None:
    assert loop_share([ord(c) for c in text], repeats) == pytest.approx(share)


def test_the_search_equals_the_definition() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        tokens = rng.integers(0, 2, rng.integers(1, 14)).tolist()
        n = len(tokens)
        matches = [next((k for k in range(n - i) if tokens[k] != tokens[i + k]), n - i) for i in range(n)]
        assert prefix_matches(tokens)[1:] == matches[1:]
        suffixes = [
            length
            for length in range(1, n + 1)
            for period in range(1, length // 2 + 1)
            if all(tokens[n - length + k] == tokens[n - length + k + period] for k in range(length - period))
        ]
        assert loop_share(tokens, 2) == max(suffixes, default=0) / n


def test_the_search_is_linear_in_the_length() -> None:
    """A loop over 30,000 tokens; comparing every period with every place would take 450 million steps."""
    assert loop_share([7] * 30_000, 2) == 1.0


def looped(sample_id: str, share: float, finish: FinishReason = FinishReason.LENGTH) -> TrainingSample:
    """Return a sample of two turns, of which the second is split by a change of weights and ends in a loop."""
    tokens = looping(share, 20)
    first, second = (action(part, [-1.0] * len(part)) for part in (tokens[:7], tokens[7:]))
    first, second = replace(first, finish=FinishReason.UNFINISHED), replace(second, finish=finish)
    before = [prompt([20]), action([5, 5, 5, 5], [-1.0] * 4), prompt([20])]
    return training_sample(sample_id, [*before, first, second], of="g")


def campo_batch(*samples: TrainingSample, rewards: tuple[float, ...]) -> UpdateBatch:
    return batch_of(samples, [group("g", *(member(f"s{i}", {"r": r}) for i, r in enumerate(rewards)))])


def test_campo_penalizes_the_share_of_the_loop() -> None:
    """Shares 0.5, 0.9 and 0: rewards 1 - 0.5, 0 - 0.9 and 0, with the mean -0.4 / 3."""
    of = campo_batch(looped("s0", 0.5), looped("s1", 0.9), looped("s2", 0.0), rewards=(1.0, 0.0, 0.0))
    found = estimator("campo", std="none")(of)
    mean = -0.4 / 3
    assert per_sample(found, of) == pytest.approx([0.5 - mean, -0.9 - mean, -mean])
    assert found.metrics == pytest.approx({"loops": 2 / 3, "loop_share_mean": 1.4 / 3})
    assert scalars(estimator("campo", std="none", loop_weight=0.0), of) == scalars(estimator("grpo", std="none"), of)


def test_campo_looks_at_the_last_turn_that_reached_its_limit() -> None:
    finished = looped("s0", 0.5, FinishReason.STOP)
    assert loop_of(finished, CampoOptions()) == 0.0
    assert loop_of(finished, CampoOptions(only_truncated=False)) == 0.5
    assert loop_of(looped("s0", 0.0), CampoOptions()) == 0.0, "the loop of an earlier turn does not count"
    assert loop_of(training_sample("s0", [prompt([1, 1, 1])]), CampoOptions(only_truncated=False)) == 0.0


def test_a_member_of_campo_that_is_not_leased_has_the_mean_penalty() -> None:
    of = campo_batch(looped("s0", 0.5), rewards=(1.0, 0.0))
    assert scalars(estimator("campo", std="none"), of) == pytest.approx([0.5])


# Truncated samples ----------------------------------------------------------------------------------------------------


def test_truncated_samples_are_dropped_and_stay_in_the_baseline() -> None:
    """Rewards 1, 0 and 0, of which the second sample reached its limit. The mean is 1 / 3, not 1 / 2."""
    samples = (looped("s0", 0.0, FinishReason.STOP), looped("s1", 0.0), looped("s2", 0.0, FinishReason.STOP))
    of = campo_batch(*samples, rewards=(1.0, 0.0, 0.0))
    made = estimator("grpo", std="none", drop_truncated=True)
    found = made(of)
    assert found.dropped == {1: "TRUNCATED"}
    assert per_sample(found, of) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert found.metrics == {"truncated_share": pytest.approx(1 / 3)}
    plain = estimator("grpo", std="none")(of)
    assert (plain.dropped, plain.metrics) == ({}, {})
    assert made.of_group(of.groups[0]) == estimator("grpo", std="none").of_group(of.groups[0])


def test_a_truncated_sample_that_is_a_loop_is_trained() -> None:
    of = campo_batch(looped("s0", 0.5), looped("s1", 0.2), looped("s2", 0.0), rewards=(0.0, 0.0, 1.0))
    found = {least: estimator("grpo", drop_truncated=True, loop_share_min=least)(of).dropped for least in (0.0, 0.5)}
    assert found == {0.0: dict.fromkeys(range(3), "TRUNCATED"), 0.5: {1: "TRUNCATED", 2: "TRUNCATED"}}


def test_a_sample_is_truncated_by_the_limit_of_its_turn_or_of_its_episode() -> None:
    stopped = looped("s0", 0.0, FinishReason.STOP)
    assert [is_truncated(s) for s in (looped("s0", 0.0), stopped)] == [True, False]
    assert is_truncated(replace(stopped, sample=replace(stopped.sample, finish=FinishReason.LENGTH)))
    observed = replace(stopped, segments=(*looped("s0", 0.0).segments, prompt([20])))
    assert not is_truncated(observed), "the turn was cut, and the conversation went on"


@pytest.mark.parametrize(
    "name", ["campo", "unlikeliness", "dsdr", "stable_reinforce", "ace", "kl_reward", "adaptive_kl", "implicit_reward"]
)
def test_every_estimator_with_the_options_of_grpo_drops_truncated_samples(name: str) -> None:
    of = campo_batch(looped("s0", 0.0), looped("s1", 0.0, FinishReason.STOP), rewards=(1.0, 0.0))
    with_columns(of, proximal=[-1.0] * int(of.lengths.sum()), reference=[-1.0] * int(of.lengths.sum()))
    found = estimator(name, drop_truncated=True)(of)
    assert found.dropped == {0: "TRUNCATED"}
    assert found.metrics["truncated_share"] == 0.5
    assert estimator(name)(of).dropped == {}


def test_a_failure_of_the_infrastructure_keeps_its_reason() -> None:
    failed = member("s0", {"r": 0.0}, outcome=Outcome.INFRA_FAILURE)
    of = batch_of([looped("s0", 0.0)], [group("g", failed, member("s1", {"r": 1.0}))])
    assert estimator("grpo", drop_truncated=True)(of).dropped == {0: "UNSCORED"}


def test_options_out_of_range_are_rejected() -> None:
    with pytest.raises(ConfigError, match="`loop_share_min` must be 0 without drop_truncated, got 0.5"):
        estimator("grpo", loop_share_min=0.5)
    with pytest.raises(ConfigError, match="`repeats_min` must be >= 2"):
        estimator("campo", repeats_min=1)
    with pytest.raises(ConfigError, match="`coefficient` must be > 0"):
        estimator("kl_reward", coefficient=0.0)
    assert KlReward.needs == ("proximal", "reference")
