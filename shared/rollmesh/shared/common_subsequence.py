"""The longest common subsequence of two sequences, of which ROUGE-L is made."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def rouge_l(one: Sequence[Hashable], other: Sequence[Hashable]) -> float:
    """Return the F1 of ROUGE-L, the harmonic mean of L / len(one) and L / len(other); 0 for two empty sequences."""
    return 2 * common_length(one, other) / max(len(one) + len(other), 1)


def common_length(left: Sequence[Hashable], right: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence, L.

    A bit of `row` is 0 where the length grows at this item of `right`, so an item of `left` costs one addition of
    integers instead of a pass over `right` (Hyyro, 2004).
    """
    places: dict[Hashable, int] = {}
    for place, item in enumerate(right):
        places[item] = places.get(item, 0) | 1 << place
    whole = (1 << len(right)) - 1
    row = whole
    for item in left:
        matches = row & places.get(item, 0)
        row = ((row + matches) | (row - matches)) & whole
    return len(right) - row.bit_count()
