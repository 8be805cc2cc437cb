"""Metrics of an update against hand-computed numbers."""

import math

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.shared.domain.trajectory import FloatArray, Outcome
from rollmesh.trainer.effective_size import effective_sample_size
from rollmesh.trainer.metrics import (
    drift_metrics,
    kl_k3,
    length_metrics,
    mean_stats,
    reward_metrics,
    source_metrics,
)

from .builders import action, group, member, prompt, training_sample


def array(*values: float) -> FloatArray:
    return np.array(values, dtype=np.float32)


def test_effective_sample_size_equals_the_hand_computed_value() -> None:
    assert effective_sample_size(array(1, 1, 1, 1)) == pytest.approx(1.0)
    assert effective_sample_size(array(1, 0, 0, 0)) == pytest.approx(0.25)
    assert effective_sample_size(array(1, 3)) == pytest.approx(16 / 20)
    assert effective_sample_size(array()) == 0.0


def test_kl_k3_equals_the_hand_computed_value() -> None:
    # r = 2 and 0.5: (2 - 1 - ln 2 + 0.5 - 1 + ln 2) / 2 = 0.25
    assert kl_k3(array(math.log(0.8), math.log(0.2)), array(math.log(0.4), math.log(0.4))) == pytest.approx(
        0.25, abs=1e-6
    )
    assert kl_k3(array(-1.0), array(-1.0)) == 0.0


def test_kl_k3_estimates_the_true_divergence() -> None:
    rng = np.random.default_rng(0)
    mu, pi = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.3, 0.4])
    drawn = rng.choice(3, 200_000, p=mu)
    estimate = kl_k3(np.log(pi)[drawn].astype(np.float32), np.log(mu)[drawn].astype(np.float32))
    assert estimate == pytest.approx(float((mu * np.log(mu / pi)).sum()), abs=2e-3)


def test_drift_is_grouped_by_lag() -> None:
    lag = np.array([0, 0, 2, -1])
    found = drift_metrics(array(-1, -1, -1 + math.log(2), -1), array(-1, -1, -1, -1), lag)
    assert found["lag/0/tokens"] == 2
    assert found["lag/0/kl"] == 0
    assert found["lag/2/kl"] == pytest.approx(1 - math.log(2), abs=1e-6)
    assert found["lag/none/tokens"] == 1
    assert found["kl"] == pytest.approx((1 - math.log(2)) / 4, abs=1e-6)
    assert found["ess"] == pytest.approx(25 / (4 * 7), abs=1e-5)
    assert found["ratio_max"] == pytest.approx(2.0, abs=1e-5)


def test_reward_means_leave_out_infrastructure_failures() -> None:
    failed = member("c", {"r": 0.0}, outcome=Outcome.INFRA_FAILURE)
    found = reward_metrics([group("g", member("a", {"r": 1.0}), member("b", {"r": 0.0}), failed)])
    assert found == {"reward/r": 0.5, "reward/unusable_share": pytest.approx(1 / 3)}


def test_the_share_of_each_source_of_a_mixture_is_of_the_groups() -> None:
    """A label `source` of tasks that are of no mixture is not one: it may have a value for each document."""
    tasks = {"sums/1": "sums", "sums/2": "sums", "queries/1": "queries", "t1": "", "t2": "doc7"}
    groups = [
        replace(group("g", member("a", {"r": 1.0})), task=task, labels={"source": name} if name else {})
        for task, name in tasks.items()
    ]
    assert source_metrics(groups) == {"source/queries/groups_share": 0.2, "source/sums/groups_share": 0.4}
    assert source_metrics([]) == {}


def test_length_bias_compares_used_with_leased() -> None:
    short, long = (training_sample(str(n), [prompt([20]), action([21] * n, [-1.0] * n)]) for n in (2, 6))
    found = length_metrics([short, long], [short])
    assert found == {"length/leased_mean": 4.0, "length/used_mean": 2.0, "length/used_over_leased": 0.5}
    assert length_metrics([], []) == {
        "length/leased_mean": 0.0,
        "length/used_mean": 0.0,
        "length/used_over_leased": 0.0,
    }


def test_token_statistics_become_shares() -> None:
    assert mean_stats({"clipped": array(1, 0, 0, 1)}) == {"clipped_share": 0.5}
