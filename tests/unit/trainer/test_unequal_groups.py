"""Groups of unequal size in one batch: a baseline reads its own group only, and weights are those of the rule that
docs/concepts.md states. All numbers are computed by hand."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext
from rollmesh.trainer.config import Normalization, UpdateConfig
from rollmesh.trainer.estimators import make_estimator
from rollmesh.trainer.losses import equal_groups, token_weights
from rollmesh.trainer.update import BatchTrainer

from .builders import group, member, random_batch


def of_size(name: str, *rewards: float) -> GroupContext:
    return group(name, *(member(f"{name}.{n}", {"correct": value}) for n, value in enumerate(rewards)))


LONE, THREE, FIVE = of_size("g0", 1.0), of_size("g1", 1.0, 0.0, 0.0), of_size("g2", 1.0, 1.0, 1.0, 1.0, 0.0)


def test_grpo_compares_each_member_with_its_own_group_whatever_its_size() -> None:
    grpo = make_estimator("grpo")
    assert grpo.of_group(LONE) == {"g0.0": 0.0}
    # mean 1/3, variance (4/9 + 1/9 + 1/9) / 3 = 2/9: (2/3) / sqrt(2/9) = sqrt(2)
    assert list(grpo.of_group(THREE).values()) == pytest.approx([sqrt(2), -sqrt(0.5), -sqrt(0.5)], rel=1e-4)
    # mean 4/5, variance (4 * 1/25 + 16/25) / 5 = 4/25: (1/5) / (2/5) = 1/2
    assert list(grpo.of_group(FIVE).values()) == pytest.approx([0.5, 0.5, 0.5, 0.5, -2.0], rel=1e-4)


def test_rloo_compares_each_member_with_the_others_of_its_group() -> None:
    rloo = make_estimator("rloo")
    assert list(rloo.of_group(THREE).values()) == pytest.approx([1.0, -0.5, -0.5])
    assert list(rloo.of_group(FIVE).values()) == pytest.approx([0.25, 0.25, 0.25, 0.25, -1.0])


def test_a_large_group_counts_by_its_samples_unless_groups_are_weighted_equally() -> None:
    groups = np.array([0, 1, 1, 1, 2, 2, 2, 2, 2])
    plain = token_weights([2] * 9, [1.0] * 9, Normalization.SEQUENCE_MEAN).reshape(9, 2).sum(1).numpy()
    assert np.bincount(groups, plain) == pytest.approx([1 / 9, 3 / 9, 5 / 9])
    # 9 samples in 3 groups: the mean is 3 samples, so the factors are 3/1, 3/3 and 3/5
    factors = equal_groups(groups, np.ones(9))
    assert factors == pytest.approx([3.0, *[1.0] * 3, *[0.6] * 5])
    equal = token_weights([2] * 9, factors.tolist(), Normalization.SEQUENCE_MEAN).reshape(9, 2).sum(1).numpy()
    assert np.bincount(groups, equal) == pytest.approx([1 / 3] * 3)


def test_dropped_samples_do_not_count_in_the_size_of_their_group() -> None:
    used = np.array([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    # 4 used samples in 2 groups: the mean is 2, so the factors are 2/3 and 2/1
    factors = equal_groups(np.array([0, 0, 0, 1, 1, 1]), used)
    assert factors[used > 0] == pytest.approx([2 / 3, 2 / 3, 2 / 3, 2.0])
    assert equal_groups(np.array([0, 0]), np.zeros(2)) == pytest.approx([1.0, 1.0])


def test_samples_that_share_the_weight_of_an_episode_count_by_their_weights() -> None:
    # 2 episodes of 1 sample, and 1 episode of 4 samples that share its weight. The sum is 3, so each group gets 3/2
    groups, weights = np.array([0, 0, 1, 1, 1, 1]), np.array([1.0, 1.0, 0.25, 0.25, 0.25, 0.25])
    factors = equal_groups(groups, weights)
    assert factors == pytest.approx([0.75, 0.75, *[1.5] * 4])
    assert np.bincount(groups, weights * factors) == pytest.approx([1.5, 1.5])


def parameters(group_weight: str, weights: list[float]) -> torch.Tensor:
    """Return the parameters after one update with 4 samples of a group and 2 of another, with these sample weights."""
    samples, groups = random_batch(num_groups=2, group_size=4)
    chosen = [replace(one, sample=replace(one.sample, weight=w)) for one, w in zip(samples[:6], weights, strict=True)]
    config = UpdateConfig(
        normalization=Normalization.SEQUENCE_MEAN,
        group_weight="equal" if group_weight == "equal" else "samples",
        update_rule=Extension("minibatches", {"num_minibatches": 1}),
    )
    trainer = BatchTrainer(build_tiny_model(TinyModelConfig(hidden_size=32), seed=1), config, seed=7)
    trainer.update(1, chosen, groups)
    return torch.cat([values.detach().flatten() for values in trainer.model.parameters()])


def test_the_trainer_weights_groups_equally_if_it_is_configured_so() -> None:
    # 6 samples in 2 groups: the mean is 3, so the factors are 3/4 and 3/2
    equal = parameters("equal", [1.0] * 6)
    assert torch.equal(equal, parameters("samples", [0.75] * 4 + [1.5] * 2))
    assert not torch.equal(equal, parameters("samples", [1.0] * 6))


def test_the_trainer_weights_groups_by_the_weights_of_their_samples() -> None:
    # the sum of the weights is 4, so each group gets 2: the factors are 2/2 and 2/2
    shared = [0.5] * 4 + [1.0] * 2
    assert torch.equal(parameters("equal", shared), parameters("samples", shared))
