"""Find what must be unique and is repeated, with 24 bytes for each entry, so that the audit of a long ledger fits in
memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Repeat(NamedTuple):
    """Two entries with the same key."""

    key: int
    position: int
    """Record of the second one."""
    first_position: int


class Repeats:
    """Keys of 63 bits, each with the record that has it, and with its owner: an owner may repeat its own key."""

    def __init__(self) -> None:
        self._columns = array("q"), array("q"), array("q")

    def add(self, key: int, position: int, owner: int) -> None:
        """Add an entry."""
        for column, value in zip(self._columns, (key, position, owner), strict=True):
            column.append(value)

    def found(self) -> Iterator[Repeat]:
        """Yield every entry whose key another owner had before, by position."""
        keys, positions, owners = (np.frombuffer(column, np.int64) for column in self._columns)
        order = np.lexsort((positions, keys))
        begins = np.flatnonzero(np.r_[True, np.diff(keys[order]) != 0]) if len(order) else order
        lengths = np.diff(np.r_[begins, len(order)])
        firsts = np.repeat(order[begins], lengths)
        repeated = owners[order] != owners[firsts]
        pairs = sorted(zip(positions[order[repeated]], keys[order[repeated]], positions[firsts[repeated]], strict=True))
        for position, key, first in pairs:
            yield Repeat(int(key), int(position), int(first))


def key_of(name: str) -> int:
    """Return 63 bits of the hash of a name, the same within one process."""
    return hash(name) & (2**63 - 1)
