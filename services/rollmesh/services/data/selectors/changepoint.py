"""Change points in the success of each category: its statistics restart after a jump of the policy.

After R-BOCPD-UCRL2 (arXiv:2304.00232), which restarts the optimistic exploration of UCRL2 when a Bayesian online
change-point detector fires. The detector is R-BOCPD (Alami, Maillard and Feraud, ICML 2020; code by the author:
Ralami1859/Restarted-BOCPD and Ralami1859/Bayesian-Online-Change-point-Detector-Matlab-codes-). Here a category of tasks
is an arm, x in [0, 1] is the success rate of a decided group, and what is chosen is the category whose success rate may
have the largest variance p (1 - p), in which groups have a signal.

Detector of one category, with r the first group since the restart and s a candidate for the last change:

    V(r..t) = product over i in r..t of m_i^x_i (1 - m_i)^(1 - x_i)       m_i = (1 + sum of x over r..i-1) / (2 + i - r)
    weight of the candidate s:  eta V(r..s-1) V(s..t)                       weight of no change:  V(r..t)
    restart if the weight of a candidate exceeds the weight of no change; then r = t + 1

V is the probability of the rates for a Laplace predictor, and eta the prior of a change per group (the code has 1 over
the horizon). A smaller eta has fewer false alarms and a longer delay.

Choice, with n(c) groups of category c since its restart, p(c) their mean rate, and t all groups since the restart:

    radius(c) = sqrt(confidence ln(t + 1) / (n(c) + groups in flight))      infinite without a group
    optimism:  p*(c) is the rate nearest to 1/2 within radius(c) of p(c);   draw a category with the largest p* (1 - p*)

Deviations. The paper has multinomial streams of states of a Markov decision process; a category has the two outcomes
success and failure, and one state. A group is one observation, also if its rate is not 0 or 1, because its members
share a prompt; the variance of a rate is at most that of one outcome, so that the false alarms are not more. UCRL2 has
the constant 3.5 for rewards (`confidence`), with which hundreds of groups decide nothing; 0.5 is Hoeffding's. Groups in
flight count in the radius, because results are late. The candidate with the smallest weight is dropped above
`candidates_max`. Whether a change restarts all statistics or those of its category (`restart`) is not established;
configuration.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from rollmesh.services.data.selector import GroupResult
from rollmesh.services.data.selectors.base import CategoryOptions, CategorySelector, Floats, Ints
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.config.settings import PositiveFloat

_log = logging.getLogger(__name__)


class ChangeDetector:
    """R-BOCPD over values in [0, 1]. Entry 0 of its arrays is the predictor since the restart, the others are the
    candidates."""

    def __init__(self, prior: float, candidates_max: int) -> None:
        self._log_prior = float(np.log(prior))
        self._candidates_max = candidates_max
        self.log_weights: Floats = np.zeros(1)
        """Log of the weights, relative to that of no change."""
        self.sums: Floats = np.zeros(1)
        self.counts: Floats = np.zeros(1)

    @property
    def num_values(self) -> int:
        """Number of values since the restart."""
        return int(self.counts[0])

    @property
    def mean(self) -> float:
        """Mean of the values since the restart, 1/2 without one."""
        return float(self.sums[0] / self.counts[0]) if self.counts[0] else 0.5

    def observe(self, value: float) -> bool:
        """Fold a value. Return whether it completes the evidence of a change."""
        means = (self.sums + 1.0) / (self.counts + 2.0)
        log_weights = self.log_weights + value * np.log(means) + (1.0 - value) * np.log1p(-means)
        log_weights -= log_weights[0]
        self.log_weights = np.append(log_weights, self._log_prior)  # eta V(r..t): the next value may be the first
        self.sums = np.append(self.sums + value, 0.0)
        self.counts = np.append(self.counts + 1.0, 0.0)
        if len(self.counts) > 1 + self._candidates_max:
            least = 1 + int(self.log_weights[1:-1].argmin())
            self._set(*(np.delete(values, least) for values in (self.log_weights, self.sums, self.counts)))
        return bool(self.log_weights[1:].max() > 0.0)

    def restart(self) -> None:
        self._set(np.zeros(1), np.zeros(1), np.zeros(1))

    def stored(self) -> list[list[float]]:
        return [values.tolist() for values in (self.log_weights, self.sums, self.counts)]

    def load(self, stored: list[list[float]]) -> None:
        log_weights, sums, counts = (np.array(values, dtype=np.float64) for values in stored)
        if not log_weights.shape == sums.shape == counts.shape or log_weights.ndim != 1 or not len(counts):
            raise ValueError(f"a detector must have three lists of one length >= 1, got {stored!r}")
        self._set(log_weights, sums, counts)

    def _set(self, log_weights: Floats, sums: Floats, counts: Floats) -> None:
        self.log_weights, self.sums, self.counts = log_weights, sums, counts


class ChangepointOptions(CategoryOptions):
    """Settings of the change-point selector."""

    prior: Annotated[float, Meta(gt=0, lt=1)] = 1e-3
    """Prior probability of a change before each group, normally 1 over the number of groups of a category in the
    run."""
    candidates_max: Annotated[int, Meta(ge=2)] = 128
    """Maximum number of candidates for the last change, per category. It bounds time and memory."""
    confidence: PositiveFloat = 0.5
    """Factor of ln(t + 1) / n in the squared radius of a success rate."""
    restart: Literal["all", "category"] = "all"
    """Statistics that a change restarts: those of all categories, or those of its category."""


class ChangepointSelector(CategorySelector):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = ChangepointOptions
    schema = "changepoint@1"

    def __init__(self, *, pool: TaskPool, seed: int, options: ChangepointOptions) -> None:
        super().__init__(pool=pool, seed=seed, label=options.label)
        self._options = options
        self.detectors = self._new_detectors()
        self.num_changes: list[int] = [0] * len(self.categories)
        """Detected changes by category."""

    def shares(self, num_in_flight: Ints) -> Floats:
        counts = np.array([detector.num_values for detector in self.detectors], dtype=np.float64)
        means = np.array([detector.mean for detector in self.detectors])
        squared = self._options.confidence * np.log(counts.sum() + 1.0) / np.maximum(1.0, counts + num_in_flight)
        radius = np.where(counts > 0, np.sqrt(squared), 1.0)
        optimistic = np.clip(0.5, means - radius, means + radius)
        scores = optimistic * (1.0 - optimistic)
        return np.asarray(scores == scores.max(), dtype=np.float64)

    def observe(self, result: GroupResult) -> None:
        total = result.successes + result.failures
        if total <= 0.0:
            return
        category = self.category_of(result)
        detector = self.detectors[category]
        before = detector.mean, detector.num_values
        if not detector.observe(result.successes / total):
            return
        self.num_changes[category] += 1
        _log.info("change of success: category=%s rate_before=%.3f groups=%d", self.categories[category], *before)
        for each in self.detectors if self._options.restart == "all" else (detector,):
            each.restart()

    def stored(self) -> dict[str, Any]:
        return {
            **super().stored(),
            "detectors": [detector.stored() for detector in self.detectors],
            "num_changes": self.num_changes,
        }

    def load(self, fields: Mapping[str, Any]) -> None:
        super().load(fields)
        detectors, num_changes = self._new_detectors(), [int(n) for n in fields["num_changes"]]
        for detector, stored in zip(detectors, fields["detectors"], strict=True):
            detector.load(stored)
        self.detectors, self.num_changes = detectors, num_changes

    def _new_detectors(self) -> list[ChangeDetector]:
        return [ChangeDetector(self._options.prior, self._options.candidates_max) for _ in self.categories]
