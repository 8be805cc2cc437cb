"""The log-ratio to the reference as a dense reward, against values by hand and an exact optimal policy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import Outcome
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.config import OptimizerConfig, UpdateConfig
from rollmesh.trainer.estimators.base import UNDECIDED
from rollmesh.trainer.update import BatchTrainer

from .builders import batch_of, group, member, minibatches, random_batch
from .test_methods import batch, estimator, rewarded, with_columns

WORDS = 3
BETA = 0.5


def optimal(rewards: np.ndarray, reference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and the log-probs of the policy that is optimal for the rewards [..., WORDS] of the next token
    and the penalty BETA KL(pi || reference)."""
    value = BETA * np.log((reference * np.exp(rewards / BETA)).sum(-1))
    return value, np.log(reference) + (rewards - value[..., None]) / BETA


@pytest.mark.row("S161")
def test_the_dense_reward_of_an_optimal_policy_is_the_advantage_of_each_token_and_ranks_samples_as_their_rewards() -> (
    None
):
    """All samples of two tokens from three words, where the reward and the second distribution depend on both."""
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(WORDS, WORDS))
    first, second = rng.dirichlet(np.ones(WORDS)), rng.dirichlet(np.ones(WORDS), size=WORDS)
    values, log_second = optimal(rewards, second)
    value, log_first = optimal(values, first)
    pairs = list(itertools.product(range(WORDS), range(WORDS)))
    of = batch(rewarded("a", *(float(rewards[pair]) for pair in pairs)))
    with_columns(
        of,
        proximal=[logprob for a, b in pairs for logprob in (log_first[a], log_second[a, b])],
        reference=[float(np.log(p)) for a, b in pairs for p in (first[a], second[a, b])],
    )
    found = estimator("implicit_reward", beta=BETA, weight=2.0)(of)
    dense = found.columns["implicit_reward"].reshape(-1, 2)
    # the reward comes with the last token, so the first token has V(s_2) - V(s_1), and the second R - V(s_2)
    expected = [(values[a] - value, rewards[a, b] - values[a]) for a, b in pairs]
    np.testing.assert_allclose(dense, expected, atol=1e-5)
    assert np.argsort(dense.sum(-1)).tolist() == np.argsort([rewards[pair] for pair in pairs]).tolist()
    assert found.metrics["order_agreement"] == 1.0
    plain = estimator("grpo")(of).advantages.reshape(-1, 2)
    np.testing.assert_allclose(found.advantages.reshape(-1, 2), plain + 2.0 * dense, atol=1e-5)


def two() -> UpdateBatch:
    """Return a group of two with log-ratios 0.5, 2 and 0, -1."""
    of = batch(rewarded("a", 1.0, 0.0))
    with_columns(of, proximal=[-1, -1, -1, -2], reference=[-1.5, -3, -1, -1])
    return of


def test_the_dense_reward_equals_the_hand_computed_value() -> None:
    found = estimator("implicit_reward", beta=0.2, weight=0.5, std="none")(two())
    assert found.columns["implicit_reward"].tolist() == pytest.approx([0.1, 0.4, 0.0, -0.2])
    assert found.advantages.tolist() == pytest.approx([0.5 + 0.05, 0.5 + 0.2, -0.5, -0.5 - 0.1])
    assert found.metrics == pytest.approx(
        {"implicit_reward_mean": 0.075, "implicit_return_mean": 0.15, "order_agreement": 1.0}
    )
    assert found.measures == {"a": {"implicit_return_mean": pytest.approx(0.15)}}
    reported = estimator("implicit_reward", weight=0.0)(two())
    assert reported.advantages.tolist() == estimator("grpo")(two()).advantages.tolist()
    assert reported.columns["implicit_reward"].any()


def test_the_log_ratio_is_limited() -> None:
    of = batch(rewarded("a", 1.0, 0.0))
    with_columns(of, proximal=[-1, -1, -1, -90], reference=[-99, -1, -1, -1])
    found = estimator("implicit_reward", beta=1.0)(of)
    assert found.columns["implicit_reward"].tolist() == [20.0, 0.0, 0.0, -20.0]


def test_pairs_of_equal_sums_count_half_and_those_that_are_not_leased_not_at_all() -> None:
    of = batch(rewarded("a", 1.0, 0.0, 0.5))
    with_columns(of, proximal=[-1] * 6, reference=[-1, -1, -1, -1, -3, -3])
    # sums 0, 0, 4: the first two are equal, the best is below the third, and the third above the worst
    assert estimator("implicit_reward")(of).metrics["order_agreement"] == pytest.approx((0.5 + 0 + 1) / 3)
    part = batch_of(of.samples[:1], of.groups)
    with_columns(part, proximal=[-1, -1], reference=[-1, -1])
    assert "order_agreement" not in estimator("implicit_reward")(part).metrics


def test_a_group_with_equal_rewards_is_kept_if_the_dense_rewards_count() -> None:
    equal, one = rewarded("a", 1.0, 1.0), rewarded("a", 1.0)
    assert estimator("implicit_reward").of_group(equal) == {"a0": UNDECIDED, "a1": UNDECIDED}
    assert estimator("implicit_reward").of_group(one) == {"a0": UNDECIDED}
    assert set(estimator("implicit_reward", weight=0.0).of_group(equal).values()) == {0.0}
    assert estimator("implicit_reward").of_group(group("a")) == {}
    assert estimator("implicit_reward").of_group(rewarded("a", 1.0, 0.0)) == estimator("grpo").of_group(
        rewarded("a", 1.0, 0.0)
    )


def test_a_failure_of_the_infrastructure_is_dropped() -> None:
    failed = member("a1", {"r": 0.0}, outcome=Outcome.INFRA_FAILURE)
    context = group("a", member("a0", {"r": 1.0}), failed, member("a2", {"r": 1.0}))
    of = batch(context)
    with_columns(of, proximal=[-1] * 6, reference=[-2] * 6)
    found = estimator("implicit_reward", beta=1.0)(of)
    assert found.dropped == {1: "UNSCORED"}
    assert found.advantages[[0, 1, 4, 5]].tolist() == [1.0] * 4


def test_a_trainer_reports_it_as_soon_as_the_policy_has_moved() -> None:
    shape = TinyModelConfig(
        hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1
    )
    config = UpdateConfig(
        estimator=Extension("implicit_reward", {"weight": 0.0}),
        update_rule=minibatches(1),
        optimizer=OptimizerConfig(lr=1e-2, warmup_updates=0),
    )
    made = BatchTrainer(build_tiny_model(shape, seed=1), config, seed=0)
    results = [made.update(k, *random_batch(num_groups=2, group_size=2, step=k - 1)) for k in (1, 2)]
    assert results[0].metrics["estimator/implicit_return_mean"] == pytest.approx(0.0, abs=1e-4)
    assert results[0].metrics["estimator/order_agreement"] <= 1
    assert results[1].metrics["estimator/order_agreement"] == 1.0, "the update made the better samples likelier"
    assert {"implicit_return_mean"} <= set(results[1].groups[0].measures)
