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
ORDERS_KEPT = 2
"""Epochs whose orders are in memory. Draws of two epochs alternate at the end of one."""


class UniformSelector(Selector):
    """See the module."""

    def __init__(self, *, pool: TaskPool, seed: int) -> None:
        self._num_tasks = len(pool)
        self._seed = seed
        self._orders: dict[int, NDArray[np.int64]] = {}
        """Orders of the newest epochs. It is replaced as a whole, because `prepare` runs in a thread."""

    def draw(self, index: int, in_flight: AbstractSet[int]) -> int:
        epoch, entry = divmod(index, self._num_tasks)
        return int(self._order_of(epoch)[entry])

    def prepare(self, first: int, num: int) -> None:
        """Permute the tasks of the epochs of these draws, which takes seconds for ten million tasks."""
        for epoch in range(first // self._num_tasks, (first + num - 1) // self._num_tasks + 1)[:ORDERS_KEPT]:
            self._order_of(epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        order = self._orders.get(epoch)
        if order is None:
            order = np.random.default_rng((self._seed, epoch)).permutation(self._num_tasks)
            self._orders = dict([*self._orders.items(), (epoch, order)][-ORDERS_KEPT:])
        return order

    def observe(self, result: GroupResult) -> None:
        """Results do not change what is drawn."""

    def snapshot(self) -> bytes:
        return _STATE

    def restore(self, state: bytes) -> None:
        if state != _STATE:
            raise CorruptSnapshot("not a snapshot of the uniform selector")
