"""A pool of some tasks of another pool, which reads each task from it."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from rollmesh.services.data.labels import LabelCodes, LabelledPool, categories_of, once_per_pool, read_labels
from rollmesh.services.data.task import PoolTask, TaskPool


class SubPool(LabelledPool):
    """The tasks at some positions of a pool. A task is at the same place among them in both."""

    def __init__(self, pool: TaskPool, positions: NDArray[np.int64]) -> None:
        """`positions` ascend."""
        self._pool = pool
        self.positions = positions
        self._digest = hashlib.sha256(pool.digest.encode() + positions.astype("<i8").tobytes()).hexdigest()

    @property
    def digest(self) -> str:
        return self._digest

    def __len__(self) -> int:
        return len(self.positions)

    def task(self, position: int) -> PoolTask:
        return self._pool.task(self._of(position))

    def position(self, task_id: str) -> int | None:
        position = self._pool.position(task_id)
        if position is None:
            return None
        index = self.index(position)
        return index if index < len(self) and self.positions[index] == position else None

    def label(self, position: int, name: str) -> str:
        return self._pool.label(self._of(position), name)

    def labels(self, name: str) -> LabelCodes:
        return read_labels(self._pool, name).at(self.positions)

    def index(self, position: int) -> int:
        """Return the number of tasks before a position of the whole pool, which is the place of a task of this pool."""
        return int(np.searchsorted(self.positions, position))

    def _of(self, position: int) -> int:
        if position < 0:
            raise IndexError(f"position must be >= 0, got {position}")
        return int(self.positions[position])


@once_per_pool
def category_pools(pool: TaskPool, label: str) -> tuple[SubPool, ...]:
    """Return the pool of each category of a label, in the order of their names. Raise ConfigError as `read_labels`."""
    return tuple(SubPool(pool, positions) for positions in categories_of(pool, label).tasks)
