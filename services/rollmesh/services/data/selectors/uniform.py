"""Uniform selection: each prompt once per epoch, in an order that differs between epochs.

Draw i of a pool of N tasks is entry i mod N of a permutation with the key (seed, i div N). The selector has no state,
so a restart at any draw neither skips nor repeats a prompt. It ignores tasks in flight, because skipping them would
break the epoch.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from rollmesh.services.data.selector import GroupResult, Selector
from rollmesh.services.data.task import TaskPool
from rollmesh.shared.errors import CorruptSnapshot

_STATE = b"uniform@1"


class UniformSelector(Selector):
    """See the module."""

    def __init__(self, *, pool: TaskPool, seed: int) -> None:
        self._num_tasks = len(pool)
        self._seed = seed
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def draw(self, index: int, in_flight: AbstractSet[int]) -> int:
        epoch, entry = divmod(index, self._num_tasks)
        if epoch != self._epoch:
            self._order = np.random.default_rng((self._seed, epoch)).permutation(self._num_tasks)
            self._epoch = epoch
        return int(self._order[entry])

    def observe(self, result: GroupResult) -> None:
        """Results do not change what is drawn."""

    def snapshot(self) -> bytes:
        return _STATE

    def restore(self, state: bytes) -> None:
        if state != _STATE:
            raise CorruptSnapshot("not a snapshot of the uniform selector")
