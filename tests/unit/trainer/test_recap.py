"""RECAP: weights of objectives from the change of their rewards, by hand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.shared.config.registry import Extension
from rollmesh.trainer.batch import UpdateBatch
from rollmesh.trainer.estimators import Estimator, make_estimator
from rollmesh.trainer.estimators.recap import OBJECTIVES_MAX, signals_of
from rollmesh.trainer.recipe import find_recipe, read_recipe

from .builders import action, batch_of, group, member, prompt, training_sample

WINDOW = 4


def estimator(**options: object) -> Estimator:
    return make_estimator(Extension("recap", {"window": WINDOW, "weight_min": 0.0, **options}))


def batch(rewards: Mapping[str, Sequence[float]], update: int = 1) -> UpdateBatch:
    """Return a batch with one group per objective, whose samples have these rewards."""
    samples, groups = [], []
    for name, values in rewards.items():
        of = f"g-{name}"
        for n, _ in enumerate(values):
            samples.append(training_sample(f"{name}-{n}", [prompt([20]), action([30, 31], [-1.0] * 2)], of=of))
        made = group(of, *(member(f"{name}-{n}", {"r": value}) for n, value in enumerate(values)))
        groups.append(replace(made, labels={"source": name} if name else {}))
    return batch_of(samples, groups, update=update)


def weights(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name.removeprefix("weight/"): v for name, v in metrics.items() if name.startswith("weight/")}


def test_the_signals_are_the_change_on_a_line_and_the_deviation_from_it() -> None:
    """0, 0.2, 0.4, 0.6 is a line with the slope 0.2. For 0, 1, 0, 1 the slope is 0.2, the line is 0.2, 0.4, 0.6, 0.8,
    and the residuals are -0.2, 0.6, -0.6, 0.2."""
    assert signals_of([0.0, 0.2, 0.4, 0.6]) == pytest.approx((0.6, 0.0))
    assert signals_of([0.6, 0.4, 0.2, 0.0]) == pytest.approx((0.6, 0.0)), "a fall is a change too"
    assert signals_of([0.0, 1.0, 0.0, 1.0]) == pytest.approx((0.6, math.sqrt(0.2)))
    assert signals_of([0.5] * 4) == pytest.approx((0.0, 0.0))


@pytest.mark.row("S059", missing="replay of general-capability data")
def test_an_objective_with_flat_reward_loses_weight_by_hand() -> None:
    """The objective a rises by 0.1 per update and b stays at 1/2 for W = 4 updates: scores 0.3 and 0, and the softmax
    of 3 and 0 at the temperature 0.1."""
    made, found = estimator(temperature=0.1), None
    for update in range(WINDOW):
        before = found
        found = made(batch({"a": [0.1 * update] * 2, "b": [1.0, 0.0]}, update + 1))
    assert before is not None
    assert weights(before.metrics) == {"a": 0.5, "b": 0.5}, "equal before the window is full"
    expected = math.exp(3.0) / (1 + math.exp(3.0))
    assert found is not None
    assert weights(found.metrics) == pytest.approx({"a": expected, "b": 1 - expected})
    assert sum(weights(found.metrics).values()) == pytest.approx(1.0)
    assert found.metrics["convergence/a"] == pytest.approx(0.3)
    assert found.metrics["instability/b"] == pytest.approx(0.0)
    assert found.sample_weights is not None
    assert found.sample_weights.tolist() == pytest.approx([2 * expected] * 2 + [2 * (1 - expected)] * 2)
    assert found.advantages.tolist()[4:] == pytest.approx([1, 1, -1, -1], rel=1e-4), "advantages are those of grpo"


def test_a_volatile_objective_gains_and_no_weight_is_below_the_least() -> None:
    made = estimator(temperature=0.01, weight_min=0.2)
    for update in range(WINDOW):
        found = made(batch({"calm": [0.5] * 2, "volatile": [float(update % 2)] * 2, "steady": [0.7] * 2}, update + 1))
    assert weights(found.metrics) == pytest.approx({"calm": 0.2, "volatile": 0.6, "steady": 0.2}, abs=1e-6)


def test_a_batch_counts_once_absent_objectives_stay_and_the_checkpoint_has_the_means() -> None:
    made, again = estimator(), estimator()
    for update in range(WINDOW):
        made(batch({"a": [0.1 * update] * 2, "b": [0.5] * 2}, update + 1))
    alone = batch({"a": [0.9] * 2}, WINDOW + 1)
    one = made(alone)
    assert made(dataclasses.replace(alone, repeat=1)).metrics == one.metrics
    assert set(weights(one.metrics)) == {"a", "b"}
    assert made.state()["means"]["b"] == [0.5] * WINDOW
    again.load_state(made.state())
    last = batch({"a": [0.2] * 2, "b": [0.1] * 2, "new": [1.0] * 2}, WINDOW + 2)
    assert again(last).metrics == made(last).metrics
    means = made.state()["means"]
    assert means["a"] == pytest.approx([0.2, 0.3, 0.9, 0.2]), "the last four"


def test_tasks_without_the_label_and_too_many_objectives_share_one() -> None:
    made = estimator()
    names = [f"source-{n}" for n in range(OBJECTIVES_MAX + 5)]
    found = made(batch({"": [1.0, 0.0], **{name: [1.0, 0.0] for name in names}}))
    assert len(weights(found.metrics)) == OBJECTIVES_MAX
    assert "other" in weights(found.metrics)
    assert found.sample_weights is not None
    assert np.allclose(found.sample_weights, 1.0)


def test_the_recipe_counts_groups_whose_rewards_agree() -> None:
    tree = read_recipe(find_recipe("recap"))[1]
    assert tree["reward"]["finalizers"] == ["keep_all"]
    assert tree["learner"]["estimator"]["options"]["label"] == "source", "the label of a mixture"
