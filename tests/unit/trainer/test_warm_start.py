"""A warm-up whose updates have no optimizer steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from rollmesh.demo.tiny_model import TinyModelConfig, build_tiny_model
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.trajectory import GroupContext, Reward, TrainingSample
from rollmesh.trainer.config import UpdateConfig
from rollmesh.trainer.model_files import published_state
from rollmesh.trainer.update import BatchTrainer, UpdateOutcome
from rollmesh.trainer.update_rules import UPDATE_RULES

from .builders import batch_of, random_batch

SMALL = TinyModelConfig(hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, num_layers=1)


def trainer(**options: Any) -> BatchTrainer:
    config = UpdateConfig(
        estimator=Extension("risk_po", {"bundle_groups": 1, "low": 0.25, "high": 0.75, "quantile_lr": 0.1}),
        update_rule=Extension("warm_start", {"num_minibatches": 2, **options}),
    )
    return BatchTrainer(build_tiny_model(SMALL, seed=1), config, seed=0)


def rollouts(k: int) -> tuple[list[TrainingSample], list[GroupContext]]:
    """Return the batch of update k: one group with the rewards 0, 1, 2, 3 in update 1, and 0, 0, 0, 1 later."""
    samples, (context,) = random_batch(num_groups=1, group_size=4, seed=k)
    values = (0.0, 1.0, 2.0, 3.0) if k == 1 else (0.0, 0.0, 0.0, 1.0)
    members = [replace(m, rewards=(Reward(name="r", value=v),)) for m, v in zip(context.members, values, strict=True)]
    return samples, [replace(context, members=tuple(members))]


@pytest.mark.row("S139")
def test_a_warm_up_fills_the_trackers_and_changes_no_weight() -> None:
    made = trainer(warmup_updates=2)
    before = {name: tensor.clone() for name, tensor in published_state(made.model).items()}
    tracked = []
    for k in (1, 2):
        result = made.update(k, *rollouts(k))
        assert result.outcome is UpdateOutcome.SKIPPED
        assert {verdict.reason for verdict in result.verdicts} == {"LEFT_OUT"}
        assert result.metrics["steps_taken"] == 0
        tracked.append(made.plugins.state()["estimator risk_po"]["tracked"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in published_state(made.model).items())
    assert not made.optimizer.state, "the moments of the optimizer begin after the warm-up"
    # the quantiles of the first batch at 0.25 and 0.75. The second has 3/4 and 4/4 of its outcomes below them, so that
    # they move by 0.1 (0.25 - 0.75) and 0.1 (0.75 - 1)
    assert tracked[0] == (0.75, 2.25)
    assert tracked[1] == pytest.approx((0.7, 2.225))

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
