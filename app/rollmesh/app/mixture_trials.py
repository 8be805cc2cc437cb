"""Runs as trials of a mixture: from their shares to their evaluation scores, and the shares to try next.

MoDoMoDo (2025-05, arXiv:2505.24871) runs a few trials with different mixture weights, fits a quadratic predictor of the
score, and trains with the weights that maximize it:

    score(w) = a + b . w + w . C w        over the simplex: w_i >= least, sum w_i = 1

    minimize over (a, b, C)   mean over the trials of (score(w) - y)^2 + ridge (|b|^2 + |C|^2)

w are the shares that the selector `mixture` requested in a run, a mean over its draws, and y is its last evaluation.
The quadratic form is that of the paper (summaries of it state it); the ridge is our own, because a few trials do not
determine K + K (K + 1) / 2 coefficients: a large one predicts their mean. Of `RIDGES`, the one with the least error of
the prediction of each trial from the others is taken. The search is our own too: the best of
random points, trials and corners, and then moves of share between two sources while the predicted score rises.

A trial is a run folder with `summary.json`, so `rollmesh mixture` reads the records that every run writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, permutations
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.app.views.source_shares import SourceShares
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.errors import ConfigError, InvalidInput

SUCCESS = "success"
"""Name of the score that is the held-out success of all tasks."""
RIDGES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
CANDIDATES = 4096
SEED = 0
STEP_FIRST, STEP_LAST = 0.1, 0.001
"""Shares that are moved between two sources in the search: each half of the one before."""
_DIGITS = 4

Floats = NDArray[np.float64]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The record of one run."""

    run: str
    folder: str
    seed: int
    updates: int
    shares: dict[str, float]
    """Requested share of each source."""
    trained: dict[str, float]
    """Share of each source in the trained groups; empty if it was not measured."""
    scores: dict[str, float]
    """The last evaluation: `success`, and that of each label such as `source=sums`."""


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """The weights to try next."""

    trials: list[Trial]
    score: list[str]
    """Names of the scores whose mean is predicted."""
    weights: dict[str, float]
    predicted: float
    best_measured: float
    """Largest score of a trial."""
    error: float
    """Root of the mean squared error of the prediction of each trial from the others."""
    error_of_mean: float
    """The same for the mean of the others: a predictor with a larger error is worth nothing."""


class _EndedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a trial reads of summary.json."""

    run: str
    seed: int
    updates: int
    source_shares: list[SourceShares] = []
    heldout_success_after: float | None = None
    heldout_by_label_after: dict[str, float] = {}


def read_trial(folder: Path) -> Trial:
    """Return the record of a run folder. Raise ConfigError for a folder without a summary, for one without a mixture,
    and for a run without an evaluation after an update."""
    path = folder / "summary.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_EndedRun)
    except OSError as err:
        raise ConfigError(
            f"{folder}: has no readable summary.json ({err.strerror}); name the folder of a run that has ended"
        ) from err
    except UNDECODABLE as err:
        raise ConfigError(f"{path}: not the summary of a run: {err}") from err
    shares = {one.source: one.requested for one in found.source_shares if one.requested is not None}
    if len(shares) < 2 or len(shares) < len(found.source_shares):
        raise ConfigError(
            f"{folder}: the run must draw from at least two sources by `data.selector: mixture` with the label "
            f"`source`, got requested shares of {len(shares)} of {len(found.source_shares)} sources"
        )
    if found.heldout_success_after is None:
        raise ConfigError(f"{folder}: the run has no evaluation after an update; set `run.eval_every`")
    return Trial(
        run=found.run,
        folder=str(folder),
        seed=found.seed,
        updates=found.updates,
        shares=shares,
        trained={one.source: one.trained for one in found.source_shares if one.trained is not None},
        scores={SUCCESS: found.heldout_success_after, **found.heldout_by_label_after},
    )


def propose(trials: Sequence[Trial], score: Sequence[str] = (), *, least: float = 0.0) -> Proposal:
    """Return the weights with the largest predicted mean of `score`, by default of `success`. Every source gets at
    least the share `least`. Raise InvalidInput for trials of different sources, too few of them, and unknown
    scores."""
    chosen = list(score) or [SUCCESS]
    names = list(trials[0].shares) if trials else []
    for trial in trials:
        if set(trial.shares) != set(names):
            raise InvalidInput(
                f"all trials must have the same sources, got {', '.join(names)} in {trials[0].folder} and "
                f"{', '.join(trial.shares)} in {trial.folder}"
            )
        if missing := [name for name in chosen if name not in trial.scores]:
            known = ", ".join(trial.scores)
            raise InvalidInput(f"--score {missing[0]}: {trial.folder} has no such score; known: {known}")
    if not 0 <= least * len(names) <= 1:
        raise InvalidInput(f"--least must be in [0, 1 / {len(names)}] for {len(names)} sources, got {least:g}")
    points = np.array([[trial.shares[name] for name in names] for trial in trials])
    values = np.array([np.mean([trial.scores[name] for name in chosen]) for trial in trials])
    if len({tuple(np.round(point, 6)) for point in points}) <= len(names):
        raise InvalidInput(
            f"a predictor of {len(names)} sources needs trials with more than {len(names)} different mixtures, got "
            f"{len(trials)} trials; run further weights, such as one source at 0.8 and the others equal"
        )
    ridge, error = min(((ridge, held_out_error(points, values, ridge)) for ridge in RIDGES), key=lambda one: one[1])
    predictor = Quadratic.fitted(points, values, ridge)
    best = search(predictor, points, least)
    of_mean = (values - values.mean()) * len(values) / (len(values) - 1)
    return Proposal(
        trials=list(trials),
        score=chosen,
        weights=dict(zip(names, _rounded(best), strict=True)),
        predicted=float(predictor(best[None])[0]),
        best_measured=float(values.max()),
        error=error,
        error_of_mean=float(np.sqrt(np.mean(np.square(of_mean)))),
    )


@dataclass(frozen=True, slots=True)
class Quadratic:
    """A quadratic function of shares, see the module."""

    center: Floats
    """[K] mean shares of the trials."""
    offset: float
    """Mean score of the trials."""
    coefficients: Floats
    """[P] of the linear and the quadratic features."""
    feature_mean: Floats
    """[P]."""

    @classmethod
    def fitted(cls, points: Floats, values: Floats, ridge: float) -> Quadratic:
        """Return the ridge regression of values [n] on shares [n, K]."""
        center = points.mean(axis=0)
        features = _features(points - center)
        mean = features.mean(axis=0)
        centered = features - mean
        gram = centered.T @ centered / len(values) + ridge * np.eye(features.shape[1])
        found = np.linalg.solve(gram, centered.T @ (values - values.mean()) / len(values))
        return cls(center, float(values.mean()), found, mean)

    def __call__(self, points: Floats) -> Floats:
        """Return the predicted scores [n] of shares [n, K]."""
        found: Floats = self.offset + (_features(points - self.center) - self.feature_mean) @ self.coefficients
        return found


def held_out_error(points: Floats, values: Floats, ridge: float) -> float:
    """Return the root of the mean squared error of the prediction of each trial from the others."""
    errors = []
    for held in range(len(values)):
        rest = np.arange(len(values)) != held
        errors.append(float(Quadratic.fitted(points[rest], values[rest], ridge)(points[~rest])[0] - values[held]))
    return float(np.sqrt(np.mean(np.square(errors))))


def _features(points: Floats) -> Floats:
    pairs = combinations_with_replacement(range(points.shape[1]), 2)
    products = [points[:, i] * points[:, j] for i, j in pairs]
    return np.concatenate([points, np.stack(products, axis=1)], axis=1)


def search(predictor: Quadratic, trials: Floats, least: float) -> Floats:
    """Return the shares [K] with the largest predicted score, each at least `least`."""
    size = trials.shape[1]
    drawn = np.random.default_rng(SEED).dirichlet(np.ones(size), CANDIDATES)
    starts = least + (1 - least * size) * np.concatenate([drawn, np.eye(size), trials, np.full((1, size), 1 / size)])
    point: Floats = starts[int(predictor(starts).argmax())]
    step = STEP_FIRST
    while step >= STEP_LAST:
        moves = [
            point + min(step, point[source] - least) * (np.eye(size)[target] - np.eye(size)[source])
            for source, target in permutations(range(size), 2)
        ]
        scores = predictor(np.array(moves))
        if scores.max() > predictor(point[None])[0] + 1e-12:
            point = moves[int(scores.argmax())]
        else:
            step /= 2
    return point


def _rounded(point: Floats) -> list[float]:
    """Return shares of few digits with the sum 1: the largest takes the rest."""
    found = [round(float(share), _DIGITS) for share in point]
    largest = int(np.argmax(point))
    found[largest] = round(found[largest] + 1 - sum(found), _DIGITS)
    return found
