"""How much two short sequences of tokens match, by a common suffix."""

from __future__ import annotations

from collections.abc import Sequence


def suffix_match(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the length of the longest suffix of either sequence that occurs in the other one without gaps, as a share
    of the longer sequence."""
    longest, above = 0, [0] * len(other)
    for row, token in enumerate(one):
        runs = [(above[column - 1] if column else 0) + 1 if token == there else 0 for column, there in enumerate(other)]
        longest = max(longest, runs[-1], *(runs if row == len(one) - 1 else ())) if runs else 0
        above = runs
    return longest / max(len(one), len(other), 1)
