"""Comparison of texts and values; the given side is hostile."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.services.sandbox.engine import RunOutcome, RunResult
from rollmesh.services.sandbox.oracle.compare import TextCompare, compare_text, off_loop, same_value, strict_json
from rollmesh.services.sandbox.oracle.verdict import HiddenTestResult, JudgeReport, JudgeVerdict, failure_of, one_line
from rollmesh.v1 import sandbox_pb2

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(JSON)
def test_value_is_the_same_after_a_trip_through_json(value: Any) -> None:
    assert same_value(value, strict_json(json.dumps(value)))


@settings(deadline=None)
@given(JSON, JSON)
def test_same_values_differ_from_python_equality_only_where_booleans_are_numbers(one: Any, other: Any) -> None:
    if same_value(one, other):
        assert one == other


@pytest.mark.parametrize(
    ("expected", "given", "same"),
    [
        (1, True, False),
        (0, False, False),
        (True, True, True),
        (1, 1.0, True),
        ("1", 1, False),
        ([1, 2], [1, 2, 3], False),
        ([[1], {"a": 0}], [[1], {"a": False}], False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (None, 0, False),
        (None, [], False),
        (10**400, 1.5, False),
        (0.3, 0.1 + 0.2, False),
    ],
)
def test_values_compare_strictly(expected: Any, given: Any, same: bool) -> None:
    assert same_value(expected, given) is same


def test_tolerance_is_relative_and_absolute_below_one() -> None:
    assert same_value(0.3, 0.1 + 0.2, 1e-9)
    assert same_value(1e9, 1e9 + 1, 1e-6)
    assert not same_value(10**9, 10**9 + 1, 1e-6), "two integers"
    assert same_value([{"a": 0.0}], [{"a": 1e-7}], 1e-6)
    assert not same_value(1.0, 1.1, 1e-6)
    assert not same_value(1.0, 10**400, 1e-6)


def test_deep_given_value_is_followed_only_as_far_as_expected() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert not same_value([1], deep)


@pytest.mark.parametrize(
    ("how", "expected", "given", "verdict"),
    [
        ("exact", "a b\nc\n", "a b\nc", "AC"),
        ("exact", "a b\nc\n", "a b \nc\n\n", "AC"),
        ("exact", "a b\nc\n", "a  b\nc\n", "PE"),
        ("exact", "a b\nc\n", "a b c", "PE"),
        ("exact", "a b", "ab", "WA"),
        ("exact", "", "\n", "AC"),
        ("lines", "a b\n7\n", "\n\n  a b\n 7.0 \n", "AC"),
        ("lines", "0.0", "-0.0", "AC"),
        ("lines", "0.5", "0.5000001", "WA"),
        ("lines", "a b\nc", "a\nb c", "WA"),
        ("lines", "a\nb", "a\n\nb", "WA"),
        ("lines", "a b", "a  b", "AC"),
        ("lines", "x 7", "y 7.0", "WA"),
        ("lines", "", "\n", "AC"),
        ("tokens", "a b\nc", "a\nb c", "AC"),
        ("tokens", "a b", "b a", "WA"),
        ("numbers", "1.0 x", "1 x", "AC"),
        ("numbers", "0.333333", "0.3333331", "AC"),
        ("numbers", "0.333333", "0.34", "WA"),
        ("numbers", "1", "nan", "WA"),
        ("numbers", "inf", "inf", "AC"),
        ("numbers", "1", "inf", "WA"),
        ("numbers", "1 2", "1", "WA"),
        ("numbers", "998244353", "998244352", "WA"),
        ("numbers", "9007199254740993", "9007199254740992", "WA"),
        ("numbers", "1" * 5000 + "7", "1" * 5000 + "8", "WA"),
        ("numbers", "1" * 5000, "+0" + "1" * 5000, "AC"),
        ("numbers", "007 -0", "7 0", "AC"),
        ("numbers", "12", "1_2", "WA"),
        ("numbers", "12", "１２", "WA"),
        ("numbers", "12", "\u0661\u0662", "WA"),
        ("numbers", "1e3 .5 5.", "1000 0.5 5", "AC"),
        ("numbers", "1e999999999", "1e999999998", "WA"),
        ("numbers", "1e99999999999999999999", "2", "WA"),
        ("exact", "a\n", "a\r\n", "AC"),
        ("exact", "a\n", "a\u00a0\n", "WA"),
        ("exact", "a\n", "a\u2003\n", "WA"),
        ("exact", "a\n", "a\x1c\n", "WA"),
        ("tokens", "a b", "a\u00a0b", "WA"),
        ("tokens", "a b", " \ta\v\f\r\nb ", "AC"),
        ("tokens", "a\x1cb", "a b", "WA"),
    ],
)
def test_texts_compare_as_the_manifest_says(how: TextCompare, expected: str, given: str, verdict: str) -> None:
    assert compare_text(expected, given, how, 1e-6).name == verdict


def test_numbers_without_tolerance_are_compared_exactly() -> None:
    assert compare_text("1000000000000000007.0", "1000000000000000009.0", "numbers", 0.0) is JudgeVerdict.WA
    assert compare_text("0.1", "0.1000000000000000055", "numbers", 0.0) is JudgeVerdict.WA
    assert compare_text("0.10", "1e-1", "numbers", 0.0) is JudgeVerdict.AC


@pytest.mark.parametrize("length", [1, 10**6])
async def test_a_long_answer_is_compared_outside_the_event_loop(length: int) -> None:
    loops = threading.get_ident()
    assert (await off_loop(length, threading.get_ident) == loops) is (length == 1)


@pytest.mark.parametrize(
    "text", ["1e999", "[-1e999]", "NaN", "[Infinity]", "[" * 100_000, "9" * 10_000, '{"a":1,"a":1}', "", "{}x"]
)
def test_strict_json_refuses_by_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - its only promise
        strict_json(text)


def test_no_message_carries_what_a_terminal_or_protobuf_chokes_on() -> None:
    shown = one_line("\x1b[2J\ud800\0" + "x\n" * 1000)
    sandbox_pb2.TestVerdict(message=shown)
    assert shown.isprintable()
    assert len(shown) <= 300


def test_every_outcome_but_ok_is_a_failure() -> None:
    for outcome in RunOutcome:
        failed = failure_of(RunResult(outcome=outcome))
        assert (failed is None) == (outcome is RunOutcome.OK)
        assert failed is None or failed.verdict is not JudgeVerdict.AC


def test_verdicts_have_the_numbers_of_the_contract() -> None:
    names = {"AC": "ACCEPTED", "WA": "WRONG_ANSWER", "RE": "RUNTIME_ERROR", "TLE": "TIME_LIMIT", "MLE": "MEMORY_LIMIT",
             "OLE": "OUTPUT_LIMIT", "PE": "PRESENTATION_ERROR"}  # fmt: skip
    assert {v.name: v.value for v in JudgeVerdict} == {
        ours: sandbox_pb2.TestOutcome.Value(f"TEST_OUTCOME_{theirs}") for ours, theirs in names.items()
    }


def test_share_is_by_weight_and_one_only_if_all_were_accepted() -> None:
    def report(*verdicts: tuple[JudgeVerdict, float], num_tests: int) -> JudgeReport:
        judged = [HiddenTestResult(name=str(n), verdict=v, weight=w) for n, (v, w) in enumerate(verdicts)]
        return JudgeReport(verdicts=judged, num_tests=num_tests, weight=4.0)

    assert report((JudgeVerdict.AC, 3.0), (JudgeVerdict.WA, 1.0), num_tests=2).accepted_share == 0.75
    assert report((JudgeVerdict.AC, 3.0), num_tests=2).accepted_share == 0.75
    assert report((JudgeVerdict.AC, 3.0), (JudgeVerdict.AC, 1.0), num_tests=2).accepted_share == 1.0
    assert report((JudgeVerdict.PE, 4.0), num_tests=1).accepted_share == 0.0
