"""The update from which the trained reward rises and a held-out verifier does not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from rollmesh.app.views.divergence import UPDATES_MIN, divergence_text, divergences
from rollmesh.services.learner.metrics_log import MetricsLine


def line(update: int, **rewards: float | None) -> MetricsLine:
    metrics = {f"reward/{name}": value for name, value in rewards.items()}
    return MetricsLine(
        update=update,
        incarnation=0,
        outcome="APPLIED",
        time_unix_s=0.0,
        metrics={**metrics, "reward/unusable_share": 0.0},
        seconds={},
    )


def run(
    trained: Callable[[int], float], truth: Callable[[int], float], *, num: int = 60, noise: float = 0.02, seed: int = 0
) -> dict[int, MetricsLine]:
    drawn = random.Random(seed)
    return {
        n: line(n, judged=trained(n) + drawn.gauss(0, noise), truth=truth(n) + drawn.gauss(0, noise))
        for n in range(1, num + 1)
    }


WEIGHTS = {"judged": 1.0}


@pytest.mark.parametrize("seed", range(5))
def test_the_update_is_that_at_which_the_truth_stops_following(seed: int) -> None:
    found = divergences(run(lambda n: n / 100, lambda n: min(n, 30) / 100, seed=seed), WEIGHTS)
    (one,) = found
    assert one.held_out == "truth"
    assert 18 <= one.update <= 34
    assert one.trained_change > 0.2
    assert one.held_out_change < 0.1
    assert f"from update {one.update} on the trained reward rises (+0." in divergence_text(one)


@pytest.mark.parametrize(
    ("trained", "truth"),
    [
        (lambda n: n / 100, lambda n: n / 100),
        (lambda n: 0.5, lambda n: 0.5),
        (lambda n: 0.5, lambda n: 0.6 - n / 200),
        (lambda n: 0.6 - n / 200, lambda n: 0.5),
    ],
    ids=["both rise", "neither rises", "only the truth falls", "the trained reward falls"],
)
def test_without_a_rise_that_the_truth_does_not_follow_nothing_is_reported(
    trained: Callable[[int], float], truth: Callable[[int], float]
) -> None:
    reported = sum(bool(divergences(run(trained, truth, seed=seed), WEIGHTS)) for seed in range(30))
    assert reported <= 2


def test_a_short_run_a_run_without_weights_and_one_without_a_held_out_reward_report_nothing() -> None:
    hacked = run(lambda n: n / 10, lambda n: 0.5)
    assert divergences(hacked, WEIGHTS)
    assert not divergences(dict(list(hacked.items())[: UPDATES_MIN - 1]), WEIGHTS)
    assert not divergences(hacked, {})
    assert not divergences(hacked, {"judged": 1.0, "truth": 0.5})
    assert not divergences({}, WEIGHTS)


def test_updates_without_the_reward_are_left_out() -> None:
    hacked = run(lambda n: n / 10, lambda n: 0.5)
    holes = {n: (line(n, judged=None) if n % 3 == 0 else one) for n, one in hacked.items()}
    (one,) = divergences(holes, WEIGHTS)
    assert one.update <= 5


def test_a_trained_reward_that_some_updates_do_not_have_is_no_rise() -> None:
    drawn = random.Random(0)
    rewards = [{name: 0.5 + drawn.gauss(0, 0.02) for name in ("judged", "truth", "steps")} for _ in range(60)]
    for early in rewards[:30]:
        del early["steps"]
    assert not divergences({n: line(n, **one) for n, one in enumerate(rewards)}, {"judged": 1.0, "steps": 1.0})
