"""Compare two result sets of queries. Pure; used by the service, which stores expected results.

Rows are compared as a multiset unless the order counts, which it does if the expected query has ORDER BY at its top
level. Columns are compared by position, or in any order, and their names are ignored. Null equals null only. Two
integers must be equal. Other numbers are equal within a tolerance whatever their type, so 1 equals 1.0; text never
equals a number.

The actual rows are hostile. The number of comparisons is bounded, and rows are counted by texts, because the hash of a
text cannot be chosen and the hash of a number can.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

Row = Sequence[Any]
Columns = Literal["ordered", "any"]

_MATCHED_MAX = 50
"""Maximum rows of one kind for which every pairing is tried; beyond it rows are paired in sorted order."""
_COLUMN_ORDERS_MAX = 24
_COLUMN_STEPS_MAX = 5000
"""Maximum orders of columns with equal values that are tried, and steps of the search for them; beyond these the result
sets count as different."""


def same(
    expected: Sequence[Row],
    actual: Sequence[Row],
    *,
    ordered: bool,
    tolerance: float = 1e-6,
    columns: Columns = "ordered",
    duplicates: bool = True,
) -> bool:
    """Return whether the rows are equal; `tolerance` is relative for numbers above 1 and absolute below. Without
    `duplicates`, only the first of equal rows counts."""
    if not duplicates:
        expected, actual = _distinct(expected), _distinct(actual)
    if len(expected) != len(actual):
        return False
    orders: Iterable[Sequence[int] | None] = [None]
    if columns == "any" and expected:
        orders = _column_orders(expected, actual, tolerance)
    return any(_same_rows(expected, _reordered(actual, order), ordered, tolerance) for order in orders)


def _same_rows(expected: Sequence[Row], actual: Sequence[Row], ordered: bool, tolerance: float) -> bool:
    if ordered:
        return all(_rows_equal(*pair, tolerance) for pair in zip(expected, actual, strict=True))
    return _same_multiset(expected, actual, tolerance)


def _distinct(rows: Sequence[Row]) -> list[Row]:
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(_key(_exact(row)), row)
    return list(first.values())


def _reordered(rows: Sequence[Row], order: Sequence[int] | None) -> Sequence[Row]:
    return rows if order is None else [[row[index] for index in order] for row in rows]


def _column_orders(expected: Sequence[Row], actual: Sequence[Row], tolerance: float) -> Iterator[Sequence[int]]:
    """Yield orders of the actual columns in which each column has the values of the expected one."""
    width = len(expected[0])
    if any(len(row) != width for row in (*expected, *actual)):
        return
    ours, theirs = ([_values(rows, index) for index in range(width)] for rows in (expected, actual))
    choices = [[index for index in range(width) if _same_values(one, theirs[index], tolerance)] for one in ours]
    yield from islice(_different(choices), _COLUMN_ORDERS_MAX)


def _values(rows: Sequence[Row], index: int) -> tuple[list[str], list[float]]:
    """Return the sorted texts and the sorted numbers of a column."""
    cells = [_cell(row[index]) for row in rows]
    return (
        sorted(_key(cell) for cell in cells if not _is_number(cell)),
        sorted(cell for cell in cells if _is_number(cell)),
    )


def _same_values(ours: tuple[list[str], list[float]], theirs: tuple[list[str], list[float]], tolerance: float) -> bool:
    return ours[0] == theirs[0] and all(
        _cells_equal(one, other, tolerance) for one, other in zip(ours[1], theirs[1], strict=True)
    )


def _different(choices: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Yield tuples of different choices, one from each list, that a bounded search finds."""
    stack: list[tuple[int, ...]] = [()]
    for _ in range(_COLUMN_STEPS_MAX):
        if not stack:
            return
        chosen = stack.pop()
        if len(chosen) == len(choices):
            yield chosen
        else:
            stack += [(*chosen, index) for index in reversed(choices[len(chosen)]) if index not in chosen]


def _same_multiset(expected: Sequence[Row], actual: Sequence[Row], tolerance: float) -> bool:
    """Compare multisets. Equal rows cancel first. The remaining rows differ at most in numbers and are paired with rows
    that agree otherwise."""
    rows = {_key(row): row for row in map(_exact, (*expected, *actual))}
    missing, extra = (Counter(_key(_exact(row)) for row in side) for side in (expected, actual))
    missing, extra = missing - extra, extra - missing
    left, right = _by_kind(missing, rows), _by_kind(extra, rows)
    return left.keys() == right.keys() and all(_paired(left[kind], right[kind], tolerance) for kind in left)


def _key(row: tuple[Any, ...]) -> str:
    """Return a text that is equal for equal rows. A float with the value of an integer has the text of the integer."""
    return repr(tuple(_key(cell) if isinstance(cell, tuple) else _canonical(cell) for cell in row))


def _canonical(cell: Any) -> Any:
    return int(cell) if isinstance(cell, float) and cell.is_integer() else cell


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


def _by_kind(counts: Counter[str], rows: Mapping[str, tuple[Any, ...]]) -> dict[str, list[tuple[Any, ...]]]:
    """Group rows by everything in them except numbers."""
    kinds: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for key, count in counts.items():
        row = rows[key]
        kind = _key(tuple("number" if _is_number(cell) else cell for cell in row))
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
