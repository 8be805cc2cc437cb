"""The prefixes that one node was sent: which blocks of tokens it has probably computed, within a bound.

A block is identified by a hash of all tokens up to its end. The hash of the first k tokens is the sum of (token + 1) *
r[i] modulo 2**64 with fixed random odd r[i], so that numpy computes the hashes of all blocks at once. Two different
prefixes of one length collide with a probability of about 2**-63. A collision costs the computation of a prefix, not a
wrong result.

Sequences are evicted whole, least recently used first, as the engines do. A block belongs to every sequence that begins
with it, so the blocks of a sequence are always complete from the first one on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollmesh.shared.domain.trajectory import IntArray

BLOCK_TOKENS = 32
"""Tokens of a block. A shorter common prefix is not found."""


class _Factors:
    """The numbers r, drawn for the longest prefix so far. A longer row begins with the same numbers."""

    def __init__(self) -> None:
        self.draw(4096)

    def draw(self, num: int) -> None:
        self.row: NDArray[np.uint64] = np.random.default_rng(0).integers(0, 1 << 64, num, np.uint64) | np.uint64(1)
        self.sums = self.row.cumsum()[BLOCK_TOKENS - 1 :: BLOCK_TOKENS].copy()
        """The part of the hash that the added 1 makes, by block."""


_factors = _Factors()


def prefix_blocks(token_ids: IntArray) -> list[int]:
    """Return one hash per whole block of `token_ids` [n], in order; each one identifies all tokens up to the end of its
    block."""
    num = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    if num == 0:
        return []
    if num > len(_factors.row):
        _factors.draw(1 << num.bit_length())
    sums = (token_ids[:num].astype(np.uint64) * _factors.row[:num]).cumsum()[BLOCK_TOKENS - 1 :: BLOCK_TOKENS]
    hashes: list[int] = (sums + _factors.sums[: len(sums)]).tolist()
    return hashes


class PrefixIndex:
    """Blocks by hash, with the number of sequences that contain each."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        self._sequences: OrderedDict[Hashable, Sequence[int]] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Number of stored blocks, where one that several sequences share counts several times."""
        return self._size

    @property
    def num_distinct(self) -> int:
        """Number of different blocks."""
        return len(self._blocks)

    def matched(self, blocks: Sequence[int]) -> int:
        """Return the number of leading blocks that are stored."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low

    def touch(self, key: Hashable) -> int:
        """Make the sequence of `key` the most recently used one. Return its number of blocks; 0 if there is none."""
        if key not in self._sequences:
            return 0
        self._sequences.move_to_end(key)
        return len(self._sequences[key])

    def add(self, key: Hashable, blocks: Sequence[int], size_max: int, distinct_max: int) -> None:
        """Store a sequence in place of the one that `key` has. Evict the least recently used ones beyond the limits.

        `size_max` limits `size`, and `distinct_max` limits `num_distinct`. Only the first blocks of a longer sequence
        are stored.
        """
        blocks = blocks[: min(size_max, distinct_max)]
        old = self._sequences.pop(key, ())
        if old and (len(old) > len(blocks) or blocks[len(old) - 1] != old[-1]):
            self._release(old)
            old = ()
        for block in blocks[len(old) :]:
            self._blocks[block] = self._blocks.get(block, 0) + 1
        self._size += len(blocks) - len(old)
        if blocks:
            self._sequences[key] = blocks
        while self._size > size_max or len(self._blocks) > distinct_max:
            self._release(self._sequences.popitem(last=False)[1])

    def clear(self) -> None:
        """Remove all sequences."""
        self._blocks.clear()
        self._sequences.clear()
        self._size = 0

    def _release(self, blocks: Sequence[int]) -> None:
        self._size -= len(blocks)
        for block in blocks:
            if self._blocks[block] == 1:
                del self._blocks[block]
            else:
                self._blocks[block] -= 1
