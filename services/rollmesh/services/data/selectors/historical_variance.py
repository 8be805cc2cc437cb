"""Training on the tasks whose success varied most in a history of epochs: one task, or few.

After 1-shot RLVR (arXiv:2504.20571; code: ypwang61/One-Shot-RLVR data/data_selection.py). A policy is first trained on
the whole pool for E epochs, in which the success rate of each task is recorded. Tasks are ranked by the variance of
these rates, and a run on the first task alone, repeated to fill each batch, comes close to one on the whole pool.

    history of task i: s(i,1), ..., s(i,E)     s(i,e) = mean success of its e-th decided group, in [0, 1]
    v(i) = var(s(i,1), ..., s(i,E)), of the population          pi(1), pi(2), ... = tasks by falling v, ties by position
    draws 0 .. E N - 1 are epochs over the N tasks in a random order; later draws are pi(1), .., pi(num_top) in turn

A task is repeated although it is in flight. Its groups after the first E scored ones do not change the ranking. If a
group of the history ended without a score, a later group of the task takes its place, and the ranking may change then.
A task that was never scored has no variance and is last.

Deviations. In the paper the second run begins from the initial model. Here the policy of the history is trained further
in the same run. For a second run set `chosen` to the task ids, which the selector logs when a draw uses the ranking for
the first time. While the last groups of the history are in flight, the ranking may still change. The published script
ranks by the standard deviation, which is the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import msgspec
import numpy as np

from rollmesh.services.data.selector import GroupResult
from rollmesh.services.data.selectors.base import Floats, StoredSelector
from rollmesh.services.data.selectors.uniform import UniformSelector
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.config.settings import NonNegativeInt, PositiveInt, Settings

_log = logging.getLogger(__name__)


class HistoricalVarianceOptions(Settings):
    """Settings of the selector by historical variance."""

    history_epochs: NonNegativeInt = 8
    """Number of epochs over the pool in which the success rates are recorded, E. The paper has 500 updates, about 53
    epochs of its pool."""
    num_top: PositiveInt = 1
    """Number of tasks that are trained after the history."""
    chosen: tuple[str, ...] = ()
    """Ids of the tasks to train, for a run without a history. `num_top` and `history_epochs` then have no effect."""

    def check_fields(self) -> None:
        if not self.chosen and self.history_epochs < 2:
            raise ValueError(
                f"`history_epochs` must be >= 2 without `chosen`, got {self.history_epochs}: a variance needs two rates"
            )


class HistoricalVarianceSelector(StoredSelector):
    """See the module."""

    Options: ClassVar[type[msgspec.Struct]] = HistoricalVarianceOptions
    schema = "historical_variance@1"

    def __init__(self, *, pool: TaskPool, seed: int, options: HistoricalVarianceOptions) -> None:
        super().__init__(pool)
        self._pool = pool
        self._epochs = UniformSelector(pool=pool, seed=seed)
        self._chosen = [_position(pool, task) for task in options.chosen]
        self._num_top = min(options.num_top, len(pool))
        self._num_epochs = 0 if self._chosen else options.history_epochs
        self.rates: dict[int, list[float]] = {}
        """Success rates by position, at most E, in the order of the decisions."""
        self._ranking: list[int] | None = None
        self._logged = False

    def draw(self, index: int, in_flight: AbstractSet[int]) -> int:
        num_history = self._num_epochs * len(self._pool)
        if index < num_history:
            return self._epochs.draw(index, in_flight)
        trained = self._chosen or self.ranking()[: self._num_top]
        if not (self._chosen or self._logged):
            self._logged = True
            variances = self.variances()
            named = ", ".join(f"{self._pool.task(n).task_id} ({variances[n]:.4f})" for n in trained)
            _log.info("the history is complete: tasks=[%s], with their variance", named)
        return trained[(index - num_history) % len(trained)]

    def prepare(self, first: int, num: int) -> None:
        if first < self._num_epochs * len(self._pool):
            self._epochs.prepare(first, num)

    def variances(self) -> Floats:
        """Return the variance of the recorded rates by position, -1 for a task without one."""
        found = np.full(len(self._pool), -1.0)
        for position, rates in self.rates.items():
            found[position] = float(np.var(rates))
        return found

    def ranking(self) -> list[int]:
        """Return the positions by falling variance."""
        if self._ranking is None:
            self._ranking = [int(n) for n in np.argsort(-self.variances(), kind="stable")]
        return self._ranking

    def observe(self, result: GroupResult) -> None:
        total = result.successes + result.failures
        if total <= 0.0:
            return
        rates = self.rates.setdefault(result.position, [])
        if len(rates) < self._num_epochs:
            rates.append(result.successes / total)
            self._ranking = None

    def stored(self) -> dict[str, Any]:
        return {"rates": sorted(self.rates.items())}

    def load(self, fields: Mapping[str, Any]) -> None:
        rates = {int(position): [float(rate) for rate in found] for position, found in fields["rates"]}
        if any(not 0 <= position < len(self._pool) for position in rates):
            raise ValueError(f"positions must be in [0, {len(self._pool)}), got {sorted(rates)}")
        self.rates, self._ranking = rates, None


def _position(pool: TaskPool, task: str) -> int:
    position = pool.position(task)
    if position is None:
        raise ValueError(f"`chosen` must name training tasks, got {task!r}, which is not in the training pool")
    return position
