"""Hidden tests of generated families: manifests that the judge reads, or a refusal."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.demo.families.calc import CalcOracle
from rollmesh.demo.families.code import CodeOracle
from rollmesh.demo.families.sql import SqlOracle
from rollmesh.sandbox_runtime.judging.sql import query
from rollmesh.services.reward.item import AnswerKey
from rollmesh.services.sandbox.oracle.manifest import FunctionManifest, Manifest, SqlManifest, parse_manifest
from rollmesh.shared.errors import UnknownOracle

KEYS: dict[str, tuple[Callable[[str], AnswerKey], str]] = {
    "code": (CodeOracle().resolve, "f(a): times 3, keep over 12, count"),
    "sql": (SqlOracle().resolve, "dak(name,rup,mef): name by mef desc, first 2"),
}


def manifest(family: str) -> Manifest:
    resolve, key = KEYS[family]
    return parse_manifest(json.dumps(resolve(key).tests))


@pytest.mark.parametrize("family", KEYS)
def test_manifest_is_one_the_judge_reads_and_the_same_every_time(family: str) -> None:
    assert manifest(family).tests
    assert manifest(family) == manifest(family)
    assert manifest(family).limits.cpu_s <= manifest(family).limits.wall_s


def test_code_expects_what_the_specification_says() -> None:
    read = manifest("code")
    assert isinstance(read, FunctionManifest)
    for test in read.tests:
        assert isinstance(test.arguments, list)
        assert test.expected == sum(3 * x > 12 for x in test.arguments[0])
    assert any(test.expected for test in read.tests)


def test_sql_expects_what_the_exemplary_query_answers_by_the_judges_own_way() -> None:
    resolve, key = KEYS["sql"]
    read = manifest("sql")
    assert isinstance(read, SqlManifest)
    for test in read.tests:
        assert test.rows == json.loads(query(test.setup, resolve(key).answers[0]))["rows"]
        assert len(test.rows or []) == 2


@pytest.mark.parametrize("oracle", [CodeOracle(), SqlOracle()])
@pytest.mark.parametrize("rest", ["", "12+3", "f(x): plus 1, import os", "dak(name,rup,mef): drop table dak"])
def test_anything_else_is_refused(oracle: CodeOracle | SqlOracle, rest: str) -> None:
    with pytest.raises(UnknownOracle):
        oracle.resolve(rest)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 999), min_size=1, max_size=9).flatmap(
        lambda numbers: st.lists(st.sampled_from("+-*"), min_size=len(numbers) - 1, max_size=len(numbers) - 1).map(
            lambda symbols: "".join(f"{a}{b}" for a, b in zip(numbers, [*symbols, ""], strict=True))
        )
    )
)
def test_calc_gives_the_value_python_gives(expression: str) -> None:
    assert CalcOracle().resolve(expression).answers == (str(eval(expression)),)


@pytest.mark.parametrize("rest", ["", "1/0", "2**9", "1+", "a", "1 + 1", "9" * 10, "+".join(["1"] * 100)])
def test_calc_refuses_anything_else(rest: str) -> None:
    with pytest.raises(UnknownOracle):
        CalcOracle().resolve(rest)
