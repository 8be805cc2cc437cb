"""Comparison of result sets: equal and different answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.sandbox_runtime.result_sets import same

cells = st.none() | st.integers(-5, 5) | st.floats(-5, 5) | st.text(max_size=2) | st.booleans()
tables = st.integers(1, 3).flatmap(lambda width: st.lists(st.lists(cells, min_size=width, max_size=width), max_size=8))


@pytest.mark.parametrize(
    ("expected", "actual", "equal"),
    [
        ([[1], [2]], [[2], [1]], True),
        ([[1], [1], [2]], [[1], [2], [2]], False),
        ([[1]], [[1], [1]], False),
        ([[1]], [[1.0000000001]], True),
        ([[1]], [[1.001]], False),
        ([[1]], [["1"]], False),
        ([[None]], [[None]], True),
        ([[None]], [[0]], False),
        ([[None]], [[""]], False),
        ([[1, 2]], [[2, 1]], False),
        ([[1]], [[1, 1]], False),
        ([["a", 0.1 + 0.2], ["b", 1]], [["b", True], ["a", 0.3]], True),
        ([["a", 1.0], ["b", 2.0]], [["a", 2.0], ["b", 1.0]], False),
        ([[1e12]], [[1e12 + 1]], True),
        ([[{"hex": "00"}]], [[{"hex": "01"}]], False),
        ([[[1, 2.0]]], [[[1, 2]]], True),
        ([[float("nan")]], [[float("nan")]], True),
        ([], [], True),
    ],
)
def test_rows_as_a_multiset(expected: list[list[Any]], actual: list[list[Any]], equal: bool) -> None:
    assert same(expected, actual, ordered=False) is equal
    assert same(actual, expected, ordered=False) is equal


def test_order_counts_when_asked() -> None:
    assert not same([[1], [2]], [[2], [1]], ordered=True)
    assert same([[1], [2]], [[1.0], [2]], ordered=True)


def test_a_pairing_is_searched_where_sorted_order_misleads() -> None:
    left = [[1.0000000, 5.0], [1.0000001, 3.0]]
    right = [[1.0000001, 5.0], [1.0000000, 3.0]]
    assert same(left, right, ordered=False)
    assert not same(left, [[1.0, 5.0], [1.0, 5.0]], ordered=False)


@settings(deadline=None)
@given(tables, st.randoms())
def test_any_shuffle_is_the_same_answer_and_a_lost_row_is_not(rows: list[list[Any]], random: Any) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert same(rows, shuffled, ordered=False)
    if rows:
        assert not same(rows, shuffled[1:], ordered=False)


def test_two_integers_must_be_equal_whatever_the_tolerance() -> None:
    assert not same([[1_000_000]], [[1_000_001]], ordered=True, tolerance=1e-3)
    assert not same([[1_000_000]], [[1_000_001]], ordered=False, tolerance=1e-3)
    assert same([[1_000_000]], [[1_000_001.0]], ordered=False, tolerance=1e-3)


class Colliding(int):
    """A number with the hash of every other one, which counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Colliding.compared += 1
        return int(self) == other

    def __hash__(self) -> int:
        return 0


def test_rows_with_equal_hashes_are_not_compared_pairwise() -> None:
    Colliding.compared = 0
    rows = [[Colliding(number)] for number in range(300)]
    assert same(rows, [[number] for number in range(300)], ordered=False)
    assert Colliding.compared < 10 * len(rows)


@pytest.mark.parametrize(
    ("expected", "actual", "equal"),
    [
        ([["a", 1], ["b", 2]], [[2, "b"], [1, "a"]], True),
        ([["a", 1], ["b", 2]], [[1, "b"], [2, "a"]], False),
        ([[1, 2], [2, 1]], [[2, 1], [1, 2]], True),
        ([[1, 2, 3], [2, 1, 3]], [[3, 1, 2], [3, 2, 1]], True),
        ([[0.3, "x"]], [["x", 0.1 + 0.2]], True),
        ([[1, 2]], [[1, 2, 2]], False),
        ([[1, 1], [1, 2]], [[1, 1], [2, 2]], False),
        ([], [], True),
    ],
)
def test_columns_in_any_order(expected: list[list[Any]], actual: list[list[Any]], equal: bool) -> None:
    assert same(expected, actual, ordered=False, columns="any") is equal


def test_the_search_for_an_order_of_columns_is_bounded() -> None:
    expected = [[1] * 30 + [2], [2] * 30 + [1]]
    actual = [[1] * 29 + [2, 2], [2] * 29 + [1, 3]]
    assert not same(expected, actual, ordered=False, columns="any")
    assert not same(
        [[n % 2] * 12 for n in range(4)], [[n // 2] * 11 + [n % 2] for n in range(4)], ordered=True, columns="any"
    )


def test_duplicates_count_unless_the_manifest_ignores_them() -> None:
    assert not same([[1], [2]], [[1], [2], [2.0]], ordered=False)
    assert same([[1], [2]], [[2], [1], [2.0]], ordered=False, duplicates=False)
    assert same([[1], [2], [1]], [[1], [2]], ordered=True, duplicates=False)
    assert not same([[1], [2]], [[1]], ordered=False, duplicates=False)
