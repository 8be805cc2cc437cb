"""Compare methods with their baselines, from the records of `python -m benchmarks methods`.

Arms of a method and of its baseline are paired by seed. For n >= 2 pairs with differences d of a measure (method minus
baseline):

    mean = sum d / n        standard error = sqrt(sum (d - mean)^2 / (n - 1) / n)

A difference is shown if |mean| > 2 standard errors. It then `agrees` with or `contradicts` the direction that the
recipe expects. Otherwise it is `not shown`. With 3 seeds, 18 % of the comparisons without a true difference exceed 2
standard errors (Student's t with 2 degrees of freedom), and with 10 seeds 8 %. So a verdict on few seeds is a hint.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from statistics import fmean, stdev
from typing import Literal

import msgspec
from msgspec.structs import replace

from benchmarks.methods.expectations import Expectation, Expected, Measure
from benchmarks.methods.records import ArmRecord, MethodArm

ERRORS = 2.0
"""Standard errors that a difference must exceed."""
Finding = Literal["agrees", "contradicts", "not shown", "no expectation"]


class MethodComparison(msgspec.Struct, frozen=True, kw_only=True):
    """A measure of a method and of its baseline on one task at one lag."""

    method: str
    baseline: str
    task: str
    lag: int
    lr: float
    measure: Measure
    seeds: int
    """Number of pairs."""
    value: float
    """Mean of the method over the seeds of the pairs."""
    baseline_value: float
    difference: float
    error: float | None
    """Standard error of the difference; None for fewer than two pairs."""
    expected: str
    """`up`, `down`, or empty."""
    verdict: Finding


def compare(
    method: str, wanted: Expected, records: Mapping[MethodArm, ArmRecord], cases: Collection[tuple[str, int]]
) -> list[MethodComparison]:
    """Return the comparisons of a method on the (task, lag) of `cases`: its expected measures, or success if it expects
    nothing there.

    A case without a pair of records is omitted. Each learning rate of the records has its own rows.
    """
    rows = []
    for task, lag in cases:
        expected = [one for one in wanted.expected if one.task == task and lag >= one.lag_min]
        measures: list[Expectation | None] = [*_widest(expected)]
        for lr, one in product(sorted({arm.lr for arm in records}, reverse=True), measures or [None]):
            measure: Measure = one.measure if one is not None else "success"
            pairs = _pairs(
                MethodArm(method=method, task=task, lag=lag, seed=0, lr=lr), wanted.baseline, measure, records
            )
            if pairs:
                rows.append(_comparison(method, wanted.baseline, (task, lag, lr), measure, pairs, one))
    return rows


def _widest(expected: Sequence[Expectation]) -> list[Expectation]:
    """Return one expectation for each measure: that with the largest `lag_min`."""
    return list({one.measure: one for one in sorted(expected, key=lambda one: one.lag_min)}.values())


def _pairs(
    arm: MethodArm, baseline: str, measure: Measure, records: Mapping[MethodArm, ArmRecord]
) -> list[tuple[float, float]]:
    """Return (method, baseline) of a measure for the seeds of which both have a record that did not fail."""
    pairs = []
    for seed in sorted({arm.seed for arm in records}):
        both = [records.get(replace(arm, method=name, seed=seed)) for name in (arm.method, baseline)]
        measured = [record.measures() for record in both if record is not None]
        if len(measured) == 2 and all(measured):
            pairs.append((measured[0][measure], measured[1][measure]))
    return pairs


def _comparison(
    method: str,
    baseline: str,
    case: tuple[str, int, float],
    measure: Measure,
    pairs: Sequence[tuple[float, float]],
    expected: Expectation | None,
) -> MethodComparison:
    differences = [one - other for one, other in pairs]
    error = stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None
    direction = expected.direction if expected is not None else ""
    return MethodComparison(
        method=method,
        baseline=baseline,
        task=case[0],
        lag=case[1],
        lr=case[2],
        measure=measure,
        seeds=len(pairs),
        value=fmean(one for one, _ in pairs),
        baseline_value=fmean(other for _, other in pairs),
        difference=fmean(differences),
        error=error,
        expected=direction,
        verdict=finding(fmean(differences), error, direction),
    )


def finding(difference: float, error: float | None, expected: str) -> Finding:
    """Return the verdict on a difference with its standard error. `expected` is `up`, `down`, or empty."""
    if not expected:
        return "no expectation"
    if error is None or abs(difference) <= ERRORS * error:
        return "not shown"
    return "agrees" if (difference > 0) == (expected == "up") else "contradicts"
