"""Compare two result sets of queries. Pure; used by the service, which stores expected results.

Rows are compared as a multiset unless the order counts, which it does if the expected query has ORDER BY at its top
level. Columns are compared by position, and their names are ignored. Null equals null only. Two integers must be equal.
Other numbers are equal within a tolerance whatever their type, so 1 equals 1.0; text never equals a number.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

Row = Sequence[Any]

_PLAIN_TOKENS = re.compile(
    r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|`[^`]*`|\[[^\]]*\]|[()]|\border\s+by\b",
    re.DOTALL | re.IGNORECASE,
)
_MATCHED_MAX = 200
"""Maximum rows of one kind for which every pairing is tried; beyond it rows are paired in sorted order."""


def is_ordered(query: str) -> bool:
    """Return whether a query orders its result: ORDER BY outside parentheses, text and comments."""
    depth = 0
    for match in _PLAIN_TOKENS.finditer(query):
        token = match.group()
        depth += (token == "(") - (token == ")")
        if depth == 0 and token[:5].lower() == "order":
            return True
    return False


def same(expected: Sequence[Row], actual: Sequence[Row], *, ordered: bool, tolerance: float = 1e-6) -> bool:
    """Return whether the rows are equal; `tolerance` is relative for numbers above 1 and absolute below."""
    if len(expected) != len(actual):
        return False
    if ordered:
        return all(_rows_equal(*pair, tolerance) for pair in zip(expected, actual, strict=True))
    return _same_multiset(expected, actual, tolerance)


def _same_multiset(expected: Sequence[Row], actual: Sequence[Row], tolerance: float) -> bool:
    """Compare multisets. Equal rows cancel first. The remaining rows differ at most in numbers and are paired with rows
    that agree otherwise."""
    missing, extra = Counter(map(_exact, expected)), Counter(map(_exact, actual))
    missing, extra = missing - extra, extra - missing
    left, right = _by_kind(missing), _by_kind(extra)
    return left.keys() == right.keys() and all(_paired(left[kind], right[kind], tolerance) for kind in left)


def _exact(row: Row) -> tuple[Any, ...]:
    return tuple(_cell(value) for value in row)


def _cell(value: Any) -> Any:
    """Return a hashable cell: a number, or a kind with a text, which never equals a number."""
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        return ("nan",) if math.isnan(value) else value
    if isinstance(value, (list, tuple)):
        return ("list", *map(_cell, value))
    if isinstance(value, dict):
        return ("struct", *sorted((key, _cell(item)) for key, item in value.items()))
    return (type(value).__name__, value)


def _by_kind(rows: Counter[tuple[Any, ...]]) -> dict[tuple[Any, ...], list[tuple[Any, ...]]]:
    """Group rows by everything in them except numbers."""
    kinds: dict[tuple[Any, ...], list[tuple[Any, ...]]] = defaultdict(list)
    for row, count in rows.items():
        kind = tuple("number" if _is_number(cell) else cell for cell in row)
        kinds[kind] += [tuple(cell for cell in row if _is_number(cell))] * count
    return kinds


def _paired(left: list[tuple[Any, ...]], right: list[tuple[Any, ...]], tolerance: float) -> bool:
    """Return whether every row on the left can be paired with a different row on the right. Sorted order nearly always
    finds a pairing; ties near a rounding edge need a search."""
    if len(left) != len(right):
        return False
    left, right = sorted(left), sorted(right)
    if all(_rows_equal(*pair, tolerance) for pair in zip(left, right, strict=True)):
        return True
    return len(left) <= _MATCHED_MAX and _matched(left, right, tolerance)


def _matched(left: list[tuple[Any, ...]], right: list[tuple[Any, ...]], tolerance: float) -> bool:
    """Return whether a perfect matching exists, by augmenting paths."""
    near = [[index for index, other in enumerate(right) if _rows_equal(row, other, tolerance)] for row in left]
    taken_by: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for index in near[row]:
            if index not in tried:
                tried.add(index)
                if index not in taken_by or place(taken_by[index], tried):
                    taken_by[index] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(left)))


def _rows_equal(expected: Row, actual: Row, tolerance: float) -> bool:
    if len(expected) != len(actual):
        return False
    return all(_cells_equal(_cell(one), _cell(other), tolerance) for one, other in zip(expected, actual, strict=True))


def _cells_equal(one: Any, other: Any, tolerance: float) -> bool:
    if one == other or (isinstance(one, int) and isinstance(other, int)):
        return bool(one == other)
    if _is_number(one) and _is_number(other):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(one, tuple) and isinstance(other, tuple) and one[:1] == other[:1] and len(one) == len(other):
        return one[0] == "list" and all(_cells_equal(a, b, tolerance) for a, b in zip(one[1:], other[1:], strict=True))
    return False


def _is_number(cell: Any) -> bool:
    return isinstance(cell, (int, float))
