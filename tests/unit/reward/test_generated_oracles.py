"""Hidden tests of generated families: manifests that the judge reads, or a refusal."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from rollmesh.services.reward.generated_oracles import CodeOracle, SqlOracle
from rollmesh.services.reward.item import AnswerKey
from rollmesh.services.reward.scorers.query import RUNNER
from rollmesh.services.sandbox.oracle.manifest import FunctionManifest, parse_manifest
from rollmesh.shared.errors import UnknownOracle

KEYS: dict[str, tuple[Callable[[str], AnswerKey], str]] = {
    "code": (CodeOracle().resolve, "f(a): times 3, keep over 12, count"),
    "sql": (SqlOracle().resolve, "user(name,city,age): name by age desc, first 2"),
}


def manifest(family: str) -> FunctionManifest:
    resolve, key = KEYS[family]
    read = parse_manifest(json.dumps(resolve(key).tests))
    assert isinstance(read, FunctionManifest)
    return read


@pytest.mark.parametrize("family", KEYS)
def test_manifest_is_one_the_judge_reads_and_the_same_every_time(family: str) -> None:
    assert manifest(family).tests
    assert manifest(family) == manifest(family)
    assert manifest(family).limits.cpu_s <= manifest(family).limits.wall_s


def test_code_expects_what_the_specification_says() -> None:
    tests = manifest("code").tests
    assert all(test.expected == sum(3 * x > 12 for x in test.arguments[0]) for test in tests)  # type: ignore[index]
    assert any(test.expected for test in tests)


def test_runner_answers_the_exemplary_query_as_expected(tmp_path: Any) -> None:
    resolve, key = KEYS["sql"]
    (tmp_path / "query.sql").write_text(resolve(key).answers[0])
    names: dict[str, Any] = {"__file__": str(tmp_path / "solution.py")}
    exec(RUNNER, names)  # noqa: S102 - our own text
    for test in manifest("sql").tests:
        assert names["run"](*test.arguments) == test.expected


def test_runner_lets_a_query_read_only(tmp_path: Any) -> None:
    (tmp_path / "query.sql").write_text("delete from user")
    names: dict[str, Any] = {"__file__": str(tmp_path / "solution.py")}
    exec(RUNNER, names)  # noqa: S102 - our own text
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        names["run"]("create table user(name text);", False)


@pytest.mark.parametrize("oracle", [CodeOracle(), SqlOracle()])
@pytest.mark.parametrize("rest", ["", "12+3", "f(x): plus 1, import os", "user(name,city,age): drop table user"])
def test_anything_else_is_refused(oracle: CodeOracle | SqlOracle, rest: str) -> None:
    with pytest.raises(UnknownOracle):
        oracle.resolve(rest)
