"""The values of a label of all tasks of a pool, as an array, and the categories that they are.

A pool of files has 10^7 tasks, so a loop over them would block the data service for seconds. A pool that has its labels
in arrays is therefore a `LabelledPool`. The categories of a pool are found once per process and shared by the selectors
of all runs and policies: the data service makes a selector when it starts, so that none of its calls waits for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollmesh.services.data.task import TaskPool

KEPT_MAX = 128
"""Pools whose categories are kept: a mixture has at most 64 sources."""

Codes = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class LabelCodes:
    """The values of a label by the position of the task. A value may have no task."""

    codes: Codes
    """Index in `values` of each task."""
    values: Sequence[str]

    def value(self, position: int) -> str:
        return self.values[int(self.codes[position])]

    def at(self, positions: NDArray[np.int64]) -> LabelCodes:
        """Return the values of the tasks at some positions."""
        return LabelCodes(self.codes[positions], self.values)


def one_value(value: str, num_tasks: int) -> LabelCodes:
    """Return the labels of tasks that all have the same value."""
    return LabelCodes(np.zeros(num_tasks, dtype=np.uint16), (value,))


class LabelledPool(TaskPool, ABC):
    """A pool that returns a label of all its tasks at once."""

    @abstractmethod
    def labels(self, name: str) -> LabelCodes:
        """Return what `label` returns for each position. Raise ConfigError if the label has too many values."""


def read_labels(pool: TaskPool, name: str) -> LabelCodes:
    """Return a label of all tasks, task by task unless the pool is labelled. Raise ConfigError as `label`."""
    if isinstance(pool, LabelledPool):
        return pool.labels(name)
    known: dict[str, int] = {}
    found = (known.setdefault(pool.label(position, name), len(known)) for position in range(len(pool)))
    codes = np.fromiter(found, dtype=np.uint32, count=len(pool))
    return LabelCodes(codes, tuple(known))


@dataclass(frozen=True, slots=True)
class Categories:
    """The values of a label that have tasks. Selectors share the arrays and change none."""

    names: tuple[str, ...]
    """Values in alphabetical order."""
    of_task: Codes
    """Index in `names` of each task."""
    tasks: tuple[NDArray[np.int64], ...]
    """Positions of the tasks of each value, ascending."""


T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _LabelOfPool:
    """A pool and a label. Pools with the same digest have the same answer."""

    pool: TaskPool
    label: str
    digest: str

    def __hash__(self) -> int:
        return hash((self.digest, self.label))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _LabelOfPool) and (self.digest, self.label) == (other.digest, other.label)


def once_per_pool(compute: Callable[[TaskPool, str], T]) -> Callable[[TaskPool, str], T]:
    """Decorate a function of a pool and a label: a process computes its result once, and every caller gets it."""
    kept = lru_cache(maxsize=KEPT_MAX)(lambda one: compute(one.pool, one.label))
    return wraps(compute)(lambda pool, label: kept(_LabelOfPool(pool, label, pool.digest)))


@once_per_pool
def categories_of(pool: TaskPool, label: str) -> Categories:
    """Return the categories of a pool. Raise ConfigError as `read_labels`."""
    found = read_labels(pool, label)
    num_tasks = np.bincount(found.codes, minlength=len(found.values))
    used = sorted(np.flatnonzero(num_tasks).tolist(), key=lambda code: found.values[code])
    new: Codes = np.zeros(len(found.values), dtype=np.uint16 if len(used) <= 1 << 16 else np.uint32)
    new[used] = np.arange(len(used))
    of_task = new[found.codes]
    in_order = np.argsort(of_task, kind="stable")
    return Categories(
        names=tuple(found.values[code] for code in used),
        of_task=of_task,
        tasks=tuple(np.split(in_order, np.cumsum(num_tasks[used])[:-1])) if used else (),
    )
