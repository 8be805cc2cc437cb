"""Admission on demand in virtual time: the learner hardly waits more than with admission to the bound, and trains on
newer samples where it is the bottleneck."""

from __future__ import annotations

import pytest

from benchmarks.admission import RATE_MIN, exponential, lognormal, pareto
from benchmarks.admission_sim import Result, Scenario, simulate

MIDDLE = lognormal(0.4, 0.5)
UPDATES = 60


def both(scenario: Scenario) -> tuple[Result, Result]:
    """Return the results with admission to the bound, and on demand."""
    return simulate(scenario, seed=0, admit_early=True), simulate(scenario, seed=0, admit_early=False)


@pytest.mark.parametrize(
    ("scenario", "share", "share_at_bound"),
    [
        (Scenario(name="fast", eta=2, episode_s=lognormal(0.2, 0.5), updates=UPDATES), 0.65, 0.25),
        (Scenario(name="fast", eta=4, episode_s=lognormal(0.2, 0.5), updates=UPDATES), 0.4, 0.1),
        (Scenario(name="fast", eta=8, episode_s=lognormal(0.2, 0.5), updates=UPDATES), 0.3, 0.1),
        (Scenario(name="heavy tail", eta=4, episode_s=pareto(0.4, 1.2, 8.0), updates=UPDATES), 0.65, 0.2),
        (Scenario(name="filtered", eta=4, episode_s=MIDDLE, filtered=0.3, updates=UPDATES), 0.7, 0.35),
        (
            Scenario(
                name="background", eta=4, episode_s=MIDDLE, publish_s=0.2, waits_for_publication=False, updates=UPDATES
            ),
            0.6,
            0.15,
        ),
    ],
    ids=lambda value: f"{value.name} {value.eta}" if isinstance(value, Scenario) else str(value),
)
def test_a_busy_learner_trains_on_newer_samples_at_the_same_rate(
    scenario: Scenario, share: float, share_at_bound: float
) -> None:
    """`share`: upper bound of the mean lag on demand over that of the bound. `share_at_bound`: of the samples at
    eta."""
    early, late = both(scenario)
    assert early.seconds / late.seconds >= RATE_MIN
    assert late.lag_mean <= share * early.lag_mean
    assert late.share_at(scenario.eta) <= share_at_bound
    assert early.share_at(scenario.eta) >= 2 * share_at_bound


@pytest.mark.parametrize(
    "scenario",
    [
        Scenario(name="rollout-bound", eta=4, episode_s=lognormal(2.0, 0.5), slots=24, updates=UPDATES),
        Scenario(name="rollout-bound", eta=2, episode_s=lognormal(10.0, 0.3), updates=UPDATES),
        Scenario(name="balanced", eta=4, episode_s=lognormal(1.0, 0.5), slots=32, updates=UPDATES),
        Scenario(name="long", eta=4, episode_s=lognormal(2.5, 0.3), updates=UPDATES),
        Scenario(name="stalls", eta=2, episode_s=MIDDLE, stall_every_s=20.0, stall_s=2.5, updates=120),
        Scenario(name="filtered", eta=4, episode_s=MIDDLE, filtered=0.6, updates=UPDATES),
        Scenario(name="exponential", eta=4, episode_s=MIDDLE, train_s=exponential(1.0), updates=UPDATES),
        Scenario(name="published rarely", eta=4, episode_s=MIDDLE, publish_every=3, updates=UPDATES),
    ],
    ids=lambda scenario: f"{scenario.name} {scenario.eta}",
)
def test_the_learner_is_not_slower(scenario: Scenario) -> None:
    early, late = both(scenario)
    assert early.seconds / late.seconds >= RATE_MIN
    assert late.lag_mean <= 1.02 * early.lag_mean


@pytest.mark.row("S005", "S012")
@pytest.mark.parametrize("seed", range(2))
def test_no_sample_is_older_than_the_bound_and_staleness_makes_the_run_faster(seed: int) -> None:
    """Episodes with a heavy tail. With a bound of 0 the run is synchronous: every update trains only on samples of the
    weights that the update before it made."""
    found = {}
    for eta in (0, 1, 4):
        scenario = Scenario(name="heavy tail", eta=eta, episode_s=pareto(0.4, 1.2, 8.0), updates=30)
        found[eta] = simulate(scenario, seed=seed, admit_early=True)
        assert max(found[eta].lags) <= eta
        assert found[eta].lags.total() == scenario.updates * scenario.batch_groups * scenario.group_size
    assert set(found[0].lags) == {0}
    assert found[0].seconds > found[1].seconds > found[4].seconds
    assert found[0].seconds / found[4].seconds > 1.2


@pytest.mark.parametrize("eta", [0, 1])
def test_bounds_without_room_for_a_queue_are_unchanged(eta: int) -> None:
    early, late = both(Scenario(name="fast", eta=eta, episode_s=MIDDLE, updates=20))
    assert (early.seconds, early.lags) == (late.seconds, late.lags)


def test_the_same_inputs_give_the_same_run() -> None:
    scenario = Scenario(name="fast", eta=4, episode_s=MIDDLE, updates=20)
    assert simulate(scenario, seed=3, admit_early=False) == simulate(scenario, seed=3, admit_early=False)
