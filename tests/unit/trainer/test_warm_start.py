"""A warm-up whose updates have no optimizer steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, TrainingSample
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.update import BatchTrainer, UpdateOutcome
from rollmesh.trainer.update_rules import UPDATE_RULES

from .builders import batch_of, random_batch

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)


def trainer(**options: Any) -> BatchTrainer:
    config = UpdateConfig(
        estimator=Extension("mssr", {"entropy_weight": 0.0, "rho_min": 0.5, "rho_max": 0.5}),
        update_rule=Extension("warm_start", {"num_minibatches": 2, **options}),
    )
    return BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=0)


def rollouts(k: int) -> tuple[list[TrainingSample], list[GroupContext]]:
    """Return the batch of update k: two groups of two, each with one success."""
    return random_batch(num_groups=2, group_size=2, seed=k)


@pytest.mark.row("S139")
def test_a_warm_up_fills_the_trackers_and_changes_no_weight() -> None:
    made = trainer(warmup_updates=2)
    before = {name: tensor.clone() for name, tensor in published_state(made.model).items()}
    visits = []
    for k in (1, 2):
        result = made.update(k, *rollouts(k))
        assert result.outcome is UpdateOutcome.SKIPPED
        assert {verdict.reason for verdict in result.verdicts} == {"LEFT_OUT"}
        assert result.metrics["steps_taken"] == 0
        visits.append(dict(made.plugins.state()["estimator mssr"]["beta"]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in published_state(made.model).items())
    assert not made.optimizer.state, "the moments of the optimizer begin after the warm-up"
    # a and b begin with 1 each. A failure and then a success halve both, and add 1 to b and then to a:
    # (0.5, 1.5), (1.25, 0.75); and again: (0.625, 1.375), (1.3125, 0.6875)
    assert visits[0]["task-of-g0"] == [1.25, 0.75]
    assert visits[1]["task-of-g0"] == [1.3125, 0.6875]

    resumed = trainer(warmup_updates=2)
    resumed.step = 2
    resumed.load_memory(made.memory())
    for one in (made, resumed):
        result = one.update(3, *rollouts(3))
        assert result.outcome is UpdateOutcome.APPLIED
        assert result.metrics["steps_taken"] == 2
    assert not all(torch.equal(tensor, before[name]) for name, tensor in published_state(made.model).items())
    assert made.plugins.state() == resumed.plugins.state()


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({}, {5, 6, 7}),
        ({"warmup_updates": 0}, {1, 2, 3, 4, 5, 6, 7}),
        ({"warmup_updates": 2, "after_update": 3}, {1, 2, 3, 6, 7}),
    ],
)
def test_the_warm_up_is_where_the_options_say(options: dict[str, int], trained: set[int]) -> None:
    rule = UPDATE_RULES.make(Extension("warm_start", options))
    plain = UPDATE_RULES.make(Extension("minibatches", {}))
    found = set()
    for k in range(1, 8):
        batch = batch_of(*rollouts(k), update=k)
        steps = list(rule.steps(batch, np.random.default_rng(k)))
        if steps:
            found.add(k)
            assert steps == list(plain.steps(batch, np.random.default_rng(k)))
    assert found == trained
