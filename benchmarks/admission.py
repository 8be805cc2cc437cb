"""Admission on demand against admission as early as the bound allows: throughput and staleness, in virtual time.

The real coordinator core runs with modeled workers and a modeled learner (admission_sim.py). Both arms of a row draw
the same durations. The unit of time is the median update of the learner.

How to read it: `rate` is updates per virtual second on demand, relative to the baseline, which admits as early as the
bound allows (`run.admit_early`); below `RATE_MIN` the bench fails. `lag` is the mean staleness of the trained samples,
`at eta` the share with the largest staleness allowed, each before -> after. `waits` is the share of time for which the
learner waited for a batch. Where the learner is the bottleneck, the lag falls to what the duration of groups requires.
Where the rollouts are, nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.admission_sim import Duration, Result, Scenario, simulate
from benchmarks.report import Report
from rollmesh.shared.errors import Internal

RATE_MIN = 0.97
ETAS = (1, 2, 4, 8)
SEEDS = (0, 1)


def lognormal(mean_s: float, sigma: float) -> Duration:
    """Return durations with this mean, and this standard deviation of the logarithm."""
    mu = math.log(mean_s) - sigma * sigma / 2
    return lambda rng: rng.lognormvariate(mu, sigma)


def pareto(mean_s: float, shape: float, max_s: float) -> Duration:
    """Return durations with a heavy tail: Pareto with this mean and shape, cut at `max_s`."""
    least_s = mean_s * (shape - 1) / shape
    return lambda rng: min(max_s, least_s * rng.paretovariate(shape))


def exponential(mean_s: float) -> Duration:
    return lambda rng: rng.expovariate(1 / mean_s)


def scenarios(eta: int, *, updates: int = 120) -> list[Scenario]:
    """Return the grid of one bound."""

    def make(name: str, episode_s: Duration, **values: Any) -> Scenario:
        return Scenario(name=name, eta=eta, episode_s=episode_s, updates=updates, **values)

    middle = lognormal(0.4, 0.5)
    return [
        make("learner-bound, episodes 0.2", lognormal(0.2, 0.5)),
        make("learner-bound, episodes 0.8", lognormal(0.8, 0.5)),
        make("learner-bound, episodes 2.5", lognormal(2.5, 0.3)),
        make("learner-bound, published in the background", middle, publish_s=0.2, waits_for_publication=False),
        make("learner-bound, groups of 1", lognormal(0.4, 0.8), group_size=1, batch_groups=16),
        make("learner-bound, 3 groups of 12", middle, group_size=12, batch_groups=3),
        make("rollout-bound, 24 slots", lognormal(2.0, 0.5), slots=24),
        make("rollout-bound, episodes 10", lognormal(10.0, 0.3)),
        make("balanced, 32 slots", lognormal(1.0, 0.5), slots=32),
        make("heavy tail, Pareto 1.2 up to 8", pareto(0.4, 1.2, 8.0)),
        make("heavy tail, Pareto 1.5 up to 20", pareto(0.3, 1.5, 20.0)),
        make("workers stall 2.5 of every 20", middle, stall_every_s=20.0, stall_s=2.5),
        make("workers stall 3.5 of every 47", middle, stall_every_s=47.0, stall_s=3.5),
        make("exponential updates", middle, train_s=exponential(1.0)),
        make("30 % filtered", middle, filtered=0.3),
        make("60 % filtered", middle, filtered=0.6),
        make("60 % filtered, heavy tail", pareto(0.3, 1.3, 6.0), filtered=0.6),
    ]


def run(quick: bool) -> Report:
    updates, etas, seeds = (40, (4,), SEEDS[:1]) if quick else (120, ETAS, SEEDS)
    report = Report("admission", f"{updates} updates of 8 groups of 4, one update takes 1, seeds {len(seeds)}")
    for eta in etas:
        report.rows += [_row(scenario, seeds) for scenario in scenarios(eta, updates=updates)]
    slow = [f"{row['scenario']} at eta {row['eta']}: {row['rate']}" for row in report.rows if row["rate"] < RATE_MIN]
    if slow and not quick:
        raise Internal(f"`rate` must be >= {RATE_MIN}, got {'; '.join(slow)}")
    return report


def _row(scenario: Scenario, seeds: Sequence[int]) -> dict[str, Any]:
    early = [simulate(scenario, seed=seed, admit_early=True) for seed in seeds]
    late = [simulate(scenario, seed=seed, admit_early=False) for seed in seeds]
    return {
        "scenario": scenario.name,
        "eta": scenario.eta,
        "rate": round(min(a.seconds / b.seconds for a, b in zip(early, late, strict=True)), 3),
        "lag": f"{_mean([r.lag_mean for r in early]):.2f} -> {_mean([r.lag_mean for r in late]):.2f}",
        "at eta": f"{_share(early, scenario):.0%} -> {_share(late, scenario):.0%}",
        "waits": f"{_waits(early):.1%} -> {_waits(late):.1%}",
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _share(results: Sequence[Result], scenario: Scenario) -> float:
    return _mean([result.share_at(scenario.eta) for result in results])


def _waits(results: Sequence[Result]) -> float:
    return _mean([result.waited_s / result.seconds for result in results])
