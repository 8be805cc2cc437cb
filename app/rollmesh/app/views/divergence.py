"""Find the update from which the trained reward rises and a held-out verifier does not: a sign of reward hacking.

A held-out verifier is a scorer whose reward has no weight, so that nothing is trained on it. The trained reward is the
weighted sum of the others. Both are means over the scored members of the groups of each update (`reward/NAME` in
metrics.jsonl). Where a finalizer filters groups without variance, changes of rewards of 0 and 1 look smaller than they
are.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollmesh.services.learner.metrics_log import MetricsLine

UPDATES_MIN = 12
"""Least number of updates over which a rise is judged."""
T_RISE = 4.0
"""Slope of the trained reward over its standard error from which it rises. It is high, because every update is tried as
the first one."""
T_FLAT = 2.0
"""Slope of the held-out reward over its standard error below which it does not rise."""
_PREFIX = "reward/"
UNUSABLE = "reward/unusable_share"
"""The metric of this prefix that is not a reward."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """A held-out reward that does not follow the trained one."""

    held_out: str
    """Name of the held-out reward."""
    update: int
    """The first update of the range in which the trained reward rises and the held-out one does not. It lasts until the
    end of the run."""
    trained_change: float
    """Change of the trained reward over the range, by a fitted line."""
    held_out_change: float
    """Change of the held-out reward over the range, by a fitted line."""


def divergences(metrics: Mapping[int, MetricsLine], weights: Mapping[str, float]) -> list[Divergence]:
    """Return the held-out rewards of a run that do not follow the trained one. `weights` are `reward.weights`; without
    weights every reward is trained, and no reward is held out."""
    rows = [(update, rewards) for update, line in sorted(metrics.items()) if (rewards := _rewards(line))]
    if not weights:
        return []
    # An update without one of the trained rewards says nothing about their sum.
    trained_names = dict.fromkeys(name for _, rewards in rows for name in rewards if weights.get(name))
    rows = [(update, rewards) for update, rewards in rows if trained_names.keys() <= rewards.keys()]
    found = []
    for name in dict.fromkeys(name for _, rewards in rows for name in rewards if not weights.get(name)):
        have = [(update, rewards) for update, rewards in rows if name in rewards]
        times = np.array([update for update, _ in have], dtype=np.float64)
        trained = np.array([sum(weights[one] * rewards[one] for one in trained_names) for _, rewards in have])
        held_out = np.array([rewards[name] for _, rewards in have])
        first = first_divergence(times, trained, held_out)
        if first is not None:
            span = times[-1] - times[first]
            found.append(
                Divergence(
                    held_out=name,
                    update=int(times[first]),
                    trained_change=float(_slope(times[first:], trained[first:])[0] * span),
                    held_out_change=float(_slope(times[first:], held_out[first:])[0] * span),
                )
            )
    return found


def first_divergence(
    times: NDArray[np.float64], trained: NDArray[np.float64], held_out: NDArray[np.float64]
) -> int | None:
    """Return the first place from which, until the end, `trained` [n] rises and `held_out` [n] does not, or None."""
    for first in range(len(times) - UPDATES_MIN + 1):
        _, rise = _slope(times[first:], trained[first:])
        _, follow = _slope(times[first:], held_out[first:])
        if rise >= T_RISE and follow < T_FLAT:
            return first
    return None


def divergence_text(one: Divergence) -> str:
    """Return a line of text."""
    return (
        f"from update {one.update} on the trained reward rises ({one.trained_change:+.3f}), but `{one.held_out}`, "
        f"which is not trained, does not ({one.held_out_change:+.3f}): look at samples of the last updates, and run "
        "`rollmesh check --probe`"
    )


def _rewards(line: MetricsLine) -> dict[str, float]:
    """Return the mean rewards of an update by name."""
    return {
        name.removeprefix(_PREFIX): value
        for name, value in line.metrics.items()
        if name.startswith(_PREFIX) and name != UNUSABLE and value is not None
    }


def _slope(times: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the slope of a line through values [n], and the slope over its standard error."""
    centered = times - times.mean()
    squares = float(centered @ centered)
    slope = float(centered @ values) / squares
    residuals = values - values.mean() - slope * centered
    error = float(np.sqrt(residuals @ residuals / (len(times) - 2) / squares))
    if error <= 1e-12 * max(1.0, abs(slope)):
        return slope, float(np.sign(slope)) * np.inf if abs(slope) > 1e-12 else 0.0
    return slope, slope / error
