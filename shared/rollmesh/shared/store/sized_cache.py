"""A cache of limited size that removes the values which were not used for the longest time."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class SizedCache(Generic[K, V]):
    """Values by key. Their sizes are given, and their sum is at most `size_max`."""

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._size = 0

    def get(self, key: K) -> V | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: K, value: V, size: int) -> None:
        """Keep a value of a new key, and remove others until it fits. A value that is larger than the cache is not
        kept."""
        if size > self.size_max:
            return
        self._values[key] = value, size
        self._size += size
        while self._size > self.size_max:
            self._size -= self._values.popitem(last=False)[1][1]
