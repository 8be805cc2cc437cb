"""Compare methods with their baselines, from the records of `python -m benchmarks methods`.

Arms of a method and of its baseline are paired by seed. For n pairs with differences d of a measure (method minus
baseline):

    mean = sum d / n        standard error = sqrt(sum (d - mean)^2 / (n - 1) / n)        t = mean / standard error

Seeds below `CONFIRM_SEED` screen: they show a difference and its error, and never a verdict. A verdict comes from other
seeds, because a method that was named for its luck in the screening would keep that luck. p is the probability of |t|
or more without a true difference (Student's t with n - 1 degrees of freedom, two-sided).

The m comparisons with an expectation of all confirmed methods are one family. They are looked at after 5, 10 and 20
seeds. Look l = 1, 2, 3 has the level q_l = `FALSE_SHARE` / 2^l. Of the comparisons that are still open, those with the
k smallest p get a verdict, for the largest k with

    p_(k) <= k q_l / m            (Benjamini and Hochberg 1995)

A comparison with a verdict gets no further seeds. The method of Benjamini and Hochberg bounds the expected share of
verdicts that are chance, which is what a table of verdicts has to promise: at most q_1 + q_2 + q_3 < 1 in 20. If no
method differs from its baseline, it bounds the probability of any verdict by the same number. Holm's method bounds that
probability in every case, but needs p <= q_l / m for the first verdict, |t| > 10 for 54 comparisons at 5 seeds. m does
not shrink as comparisons are decided, so that the levels of the looks add up. Simulations in the tests are within the
bound for independent comparisons and for ones that share baselines.

A comparison is tested at a look only if all its arms of that look have a record. A test after each new seed would
raise the share of verdicts by chance. A pair with a failed arm is excluded, so the figures are those of seeds at which
both arms ended.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from statistics import fmean, stdev
from typing import Literal

import msgspec

from benchmarks.methods.expectations import Expectation, Expected, Measure
from benchmarks.methods.records import ArmRecord, MethodArm

CONFIRM_SEED = 100
"""The first seed that counts for verdicts. Those below it screen."""
LOOKS = (5, 10, 20)
"""Numbers of seeds after which a comparison may be decided."""
FALSE_SHARE = 0.05
"""Largest expected share of verdicts without a true difference."""
Direction = Literal["up", "down", ""]
Finding = Literal["agrees", "contradicts", "not shown", "no verdict", "no expectation"]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared: a measure of a method and of its baseline on one task, at one lag and learning rate."""

    method: str
    baseline: str
    like: str
    """The method whose `baseline_settings` the baseline has; empty if there are none."""
    task: str
    lag: int
    lr: float
    measure: Measure
    expected: Direction
    """Expected direction of the difference; empty if nothing is expected."""

    def arms(self, seed: int) -> tuple[MethodArm, MethodArm]:
        """Return the arms of the baseline and of the method."""
        baseline = MethodArm(method=self.baseline, like=self.like, task=self.task, lag=self.lag, seed=seed, lr=self.lr)
        return baseline, MethodArm(method=self.method, task=self.task, lag=self.lag, seed=seed, lr=self.lr)


class MethodComparison(msgspec.Struct, frozen=True, kw_only=True):
    """A case with its figures and its verdict."""

    case: Case
    stage: Literal["screen", "confirm"]
    seeds: int
    """Number of pairs."""
    value: float
    """Mean of the method over the seeds of the pairs."""
    baseline_value: float
    difference: float
    error: float | None
    """Standard error of the difference; None for fewer than two pairs."""
    p: float | None
    """Probability of such a difference by chance; None without a verdict."""
    verdict: Finding


def cases(method: str, wanted: Expected, places: Collection[tuple[str, int]], lrs: Collection[float]) -> list[Case]:
    """Return the cases of a method on the (task, lag) of `places`: its expected measures, or success if it expects
    nothing there."""
    if method == wanted.baseline:
        return []
    found = []
    for task, lag in places:
        for lr in sorted(set(lrs), reverse=True):
            expected: list[Expectation | None] = [*_widest(wanted.expected, task, lag, lr)]
            found += [
                Case(
                    method=method,
                    baseline=wanted.baseline,
                    like=method if wanted.baseline_settings else "",
                    task=task,
                    lag=lag,
                    lr=lr,
                    measure=one.measure if one is not None else "success",
                    expected=one.direction if one is not None else "",
                )
                for one in expected or [None]
            ]
    return found


def _widest(expected: Sequence[Expectation], task: str, lag: int, lr: float) -> list[Expectation]:
    """Return one expectation for each measure that holds there: that with the largest `lag_min`."""
    holding = [
        one for one in expected if one.task == task and lag >= one.lag_min and (one.lr_max is None or lr <= one.lr_max)
    ]
    return list({one.measure: one for one in sorted(holding, key=lambda one: one.lag_min)}.values())


def screened(found: Sequence[Case], records: Mapping[MethodArm, ArmRecord]) -> list[MethodComparison]:
    """Return the comparisons over the seeds that screen. A case without a pair is omitted."""
    seeds = sorted({arm.seed for arm in records if arm.seed < CONFIRM_SEED})
    rows = []
    for case in found:
        pairs = [pair for seed in seeds if (pair := _pair(case, seed, records)) is not None]
        if pairs:
            rows.append(_comparison(case, "screen", pairs, None, "no verdict" if case.expected else "no expectation"))
    return rows


def confirmed(family: Sequence[Case], records: Mapping[MethodArm, ArmRecord], num_seeds: int) -> list[MethodComparison]:
    """Return the comparisons of a family over the seeds that confirm, up to the look that decided each, or else up to
    the last one whose arms all have a record. Before the first look they have the seeds so far, and no p. A case
    without a pair is omitted."""
    pairs = _confirming_pairs(family, records, num_seeds)
    found = decided(_differences(pairs))
    rows = []
    for case in family:
        look = found.get(case) or max((one for one in LOOKS if one <= len(pairs[case])), default=0)
        complete = [pair for pair in pairs[case][: look or None] if pair is not None]
        if complete:
            is_tested = look > 0 and len(complete) >= LOOKS[0]
            verdict: Finding = "not shown" if is_tested else "no verdict"
            if case in found:
                up = fmean(one - other for one, other in complete) > 0
                verdict = "agrees" if up == (case.expected == "up") else "contradicts"
            p = paired_p([one - other for one, other in complete]) if is_tested else None
            rows.append(_comparison(case, "confirm", complete, p, verdict))
    return rows


def open_cases(family: Sequence[Case], records: Mapping[MethodArm, ArmRecord], num_seeds: int) -> list[Case]:
    """Return the cases without a verdict after `num_seeds` seeds that confirm."""
    found = decided(_differences(_confirming_pairs(family, records, num_seeds)))
    return [case for case in family if case not in found]


def decided(differences: Mapping[Case, Sequence[float | None]]) -> dict[Case, int]:
    """Return the look at which each case got its verdict. `differences` has the whole family, and for each case its
    differences by seed, None for a pair with a failed arm. A case is tested at the looks that these seeds fill."""
    found: dict[Case, int] = {}
    for number, look in enumerate(LOOKS, 1):
        ps: dict[Case, float] = {}
        for case, by_seed in differences.items():
            complete = [one for one in by_seed[:look] if one is not None]
            if case not in found and len(by_seed) >= look and len(complete) >= LOOKS[0]:
                ps[case] = paired_p(complete)
        passed = benjamini_hochberg(list(ps.values()), FALSE_SHARE / 2**number, len(differences))
        found |= {case: look for case, is_passed in zip(ps, passed, strict=True) if is_passed}
    return found


def benjamini_hochberg(ps: Sequence[float], level: float, num_family: int) -> list[bool]:
    """Return which of the hypotheses are rejected. The family may have more members than there are p."""
    ordered = sorted(ps)
    passing = [p for k, p in enumerate(ordered, 1) if p <= k * level / num_family]
    return [bool(passing) and p <= passing[-1] for p in ps]


def paired_p(differences: Sequence[float]) -> float:
    """Return the probability of a mean as far from 0 without a true difference, for two or more differences."""
    mean = fmean(differences)
    if mean == 0.0:
        return 1.0
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in differences) / (len(differences) - 1) / len(differences))
    return student_p(mean / error if error else math.inf, len(differences) - 1)


def student_p(t: float, dof: int) -> float:
    """Return the probability that Student's t has at least this absolute value (Abramowitz and Stegun 26.7.3, 26.7.4,
    which are exact)."""
    theta = math.atan(abs(t) / math.sqrt(dof))
    cosine, sine = math.cos(theta), math.sin(theta)
    odd = dof % 2
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, dof - 1, 2):
        total += term
        term *= cosine * cosine * (power + 1) / (power + 2)
    inside = 2.0 / math.pi * (theta + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1.0 - inside))


def _pair(case: Case, seed: int, records: Mapping[MethodArm, ArmRecord]) -> tuple[float, float] | None:
    """Return (method, baseline) of the measure, or None unless both arms have a record that did not fail."""
    baseline, method = (records.get(arm) for arm in case.arms(seed))
    if baseline is None or method is None or baseline.error or method.error:
        return None
    return method.measures()[case.measure], baseline.measures()[case.measure]


_Pairs = Mapping[Case, Sequence[tuple[float, float] | None]]


def _confirming_pairs(family: Sequence[Case], records: Mapping[MethodArm, ArmRecord], num_seeds: int) -> _Pairs:
    """Return the pairs of each case by seed, up to the first seed at which an arm has no record. None is a pair with a
    failed arm."""
    return {case: [_pair(case, seed, records) for seed in _recorded_seeds(case, records, num_seeds)] for case in family}


def _recorded_seeds(case: Case, records: Mapping[MethodArm, ArmRecord], num_seeds: int) -> Iterator[int]:
    seeds = range(CONFIRM_SEED, CONFIRM_SEED + num_seeds)
    return takewhile(lambda seed: all(arm in records for arm in case.arms(seed)), seeds)


def _differences(pairs: _Pairs) -> dict[Case, list[float | None]]:
    return {case: [None if pair is None else pair[0] - pair[1] for pair in found] for case, found in pairs.items()}


def _comparison(
    case: Case,
    stage: Literal["screen", "confirm"],
    pairs: Sequence[tuple[float, float]],
    p: float | None,
    verdict: Finding,
) -> MethodComparison:
    differences = [one - other for one, other in pairs]
    return MethodComparison(
        case=case,
        stage=stage,
        seeds=len(pairs),
        value=fmean(one for one, _ in pairs),
        baseline_value=fmean(other for _, other in pairs),
        difference=fmean(differences),
        error=stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else None,
        p=p,
        verdict=verdict,
    )
