"""Manifests and their store: accepted manifests, and errors with file, line and field."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.sandbox.config import ProfileConfig, SandboxConfig
from rollmesh.services.sandbox.oracle.hidden_tests import require_hidden
from rollmesh.services.sandbox.oracle.manifest import (
    FunctionManifest,
    Manifest,
    ManifestError,
    StdioManifest,
    manifest_of,
    parse_manifest,
    require_room,
    with_prelude,
)
from rollmesh.services.sandbox.oracle.store import ManifestStore
from rollmesh.shared.errors import ConfigError, UnknownOracle
from rollmesh.shared.store.records import RecordError

FUNCTION: dict[str, Any] = {"kind": "function", "function": "f", "tests": [{"arguments": [1], "expected": 2}]}
STDIO: dict[str, Any] = {"kind": "stdio", "tests": [{"stdin": "1", "stdout": "2"}]}


@pytest.mark.parametrize(
    ("changes", "field", "cause"),
    [
        ({"kind": "spoken"}, "kind", "spoken"),
        ({"test": []}, "", "test"),
        ({"tests": []}, "", "1 to"),
        ({"tests": [{"arguments": "1", "expected": 2}]}, "tests[0].arguments", "array"),
        ({"tests": [{"arguments": [1]}]}, "tests[0]", "expected"),
        ({"tests": [{"arguments": [], "expected": 1, "weight": 0}]}, "", "tests[0].weight"),
        ({"tests": [{"arguments": [], "expected": 1, "name": "2"}] * 2}, "", "'2' twice"),
        ({"function": "f()"}, "", "function"),
        ({"compare": "checker"}, "", "checker"),
        ({"checker": {"source": "x"}}, "", "checker"),
        ({"compare": "nearly"}, "compare", "nearly"),
        ({"limits": {"wall_s": -1}}, "limits", "wall_s"),
        ({"time_limits_max": 0}, "", "time_limits_max"),
    ],
)
def test_manifest_error_names_the_field(changes: dict[str, Any], field: str, cause: str) -> None:
    with pytest.raises(ManifestError) as caught:
        manifest_of({**FUNCTION, **changes})
    assert caught.value.field == field
    assert cause in caught.value.cause


UNIT = "import unittest, solution\n"


@pytest.mark.parametrize(
    ("source", "tests", "cause"),
    [
        ("def helper(): pass", [], "tests must hold 1 to"),
        ("'Only a text.'\nx = 1", [], "tests must hold 1 to"),
        ("async def test_a(): pass\ndef test_b(): pass", [], "the test test_a is async, which is not supported"),
        ("class TestA:\n    async def test_a(self): pass", [], "the test TestA.test_a is async"),
        ("@unittest.skip('x')\ndef test_a(): pass", [], "tests must hold 1 to"),
        ("@unittest.skip('x')\ndef test_a(): pass\ndef test_b(): pass", ["test_a"], "'test_a', which the source lacks or skips"),
        ("from unittest.mock import patch\n@patch('builtins.input')\ndef test_a(m): pass", [], "patch('builtins.input') cannot work"),
        ("def test_a():\n    with unittest.mock.patch('solution.LIMIT', 3): pass", [], "patch('solution.LIMIT') cannot work"),
    ],
)  # fmt: skip
def test_hidden_tests_that_cannot_work_are_refused(source: str, tests: list[str], cause: str) -> None:
    with pytest.raises(ManifestError) as caught:
        manifest_of({"kind": "unit", "source": UNIT + source, "tests": [{"name": name} for name in tests]})
    assert cause in caught.value.cause


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("assert solution.f()", ["module"]),
        ("def check(f): assert f(1)\ncheck(solution.f)", ["module"]),
        ("assert solution.f()\ndef test_a(): pass", ["test_a"]),
        ("@unittest.skip('x')\ndef test_a(): pass\ndef test_b(): pass", ["test_b"]),
        ("@unittest.skip('x')\nclass TestA:\n    def test_a(self): pass\ndef test_b(): pass", ["test_b"]),
        ("@unittest.mock.patch('time.time')\ndef test_a(m): pass", ["test_a"]),
    ],
)
def test_hidden_tests_are_found_by_their_syntax(source: str, names: list[str]) -> None:
    manifest = manifest_of({"kind": "unit", "source": UNIT + source})
    assert [test.name for test in manifest.tests] == names


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("x = 1", "import math\nx = 1"),
        ("from __future__ import annotations\nx = 1", "from __future__ import annotations\nimport math\nx = 1"),
    ],
)
def test_prelude_is_put_in_front_of_the_entry_alone(code: str, expected: str) -> None:
    files = {"solution.py": code.encode(), "other.py": b"y = 1"}
    given = with_prelude(manifest_of({**FUNCTION, "prelude": "import math"}), files)
    assert given == {"solution.py": expected.encode(), "other.py": b"y = 1"}
    assert with_prelude(manifest_of(FUNCTION), files) == files


@pytest.mark.parametrize("text", ["{", '{"kind": "stdio", "kind": "function"}', '{"x": NaN}', "[" * 100_000, b"\xff{}"])
def test_text_that_is_no_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(ManifestError, match="is not"):
        parse_manifest(text)


def test_big_numbers_survive() -> None:
    manifest = parse_manifest(json.dumps({**FUNCTION, "tests": [{"arguments": [10**30], "expected": 10**40}]}))
    assert isinstance(manifest, FunctionManifest)
    assert (manifest.tests[0].arguments, manifest.tests[0].expected) == ([10**30], 10**40)


def test_store_finds_files_and_lines_by_reference(tmp_path: Path) -> None:
    (tmp_path / "calc").mkdir()
    (tmp_path / "calc" / "sum.json").write_text(json.dumps(FUNCTION))
    (tmp_path / "easy.jsonl").write_text(
        f"{json.dumps({'ref': 'a', **STDIO})}\n\n{json.dumps({'ref': 'b', **FUNCTION})}\n"
    )
    (tmp_path / "notes.md").write_text("not a manifest")
    store = ManifestStore(tmp_path)
    assert len(store) == 3
    assert isinstance(store.manifest("calc/sum"), FunctionManifest)
    assert isinstance(store.manifest("easy:a"), StdioManifest)
    assert isinstance(store.manifest("easy:b"), FunctionManifest)
    assert isinstance(ManifestStore(tmp_path / "easy.jsonl").manifest("b"), FunctionManifest)


@pytest.mark.parametrize("ref", ["", "easy", "../secret", "/etc/passwd", "calc/../calc/sum"])
def test_store_knows_only_its_references(tmp_path: Path, ref: str) -> None:
    (tmp_path / "calc.json").write_text(json.dumps(FUNCTION))
    with pytest.raises(UnknownOracle):
        ManifestStore(tmp_path).manifest(ref)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("{", ":2: is not JSON"),
        (json.dumps(STDIO), ':2: field "ref"'),
        (json.dumps({"ref": "a", **STDIO}), ":2: field \"ref\": oracle_ref 'a' is already defined at "),
        (json.dumps({"ref": "b", **STDIO, "tests": [{"stdin": 1, "stdout": ""}]}), ':2: field "tests[0].stdin"'),
    ],
)
def test_store_error_names_file_line_and_field(tmp_path: Path, line: str, error: str) -> None:
    path = tmp_path / "tests.jsonl"
    path.write_text(f"{json.dumps({'ref': 'a', **STDIO})}\n{line}\n")
    with pytest.raises(RecordError) as caught:
        ManifestStore(path)
    assert str(caught.value).startswith(f"{path}{error}")


def test_store_refuses_a_file_that_changed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(FUNCTION))
    store = ManifestStore(tmp_path)
    path.write_text(json.dumps({**FUNCTION, "function": "other"}))
    with pytest.raises(UnknownOracle, match="has changed"):
        store.manifest("a")
    os.unlink(path)
    with pytest.raises(UnknownOracle, match="has changed"):
        store.manifest("a")


def test_manifest_with_more_expected_output_than_is_kept_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    long = manifest_of({**STDIO, "tests": [{"stdout": "x"}, {"stdout": "y" * 99 + "\n"}]})
    with pytest.raises(
        ManifestError, match=r"tests\[1\].stdout: must be shorter than `output_bytes` \(100\), got 100 bytes"
    ):
        require_room(long, 100)
    require_room(long, 101)
    wide = manifest_of({**FUNCTION, "tests": [{"arguments": [], "expected": list(range(100))}]})
    with pytest.raises(ManifestError, match=r"tests\[0\].expected"):
        require_room(wide, 300)
    checked = {"compare": "checker", "checker": {"source": "def check(*_): return True"}}
    require_room(manifest_of({**STDIO, **checked}), 1)
    (tmp_path / "long.json").write_text(json.dumps({**STDIO, "tests": [{"stdout": "x" * 1000}]}))

    def check(manifest: Manifest) -> None:
        require_room(manifest, 1000)

    with pytest.raises(RecordError, match=r'long.json:1: field "tests\[0\].stdout"'):
        ManifestStore(tmp_path, check)


def test_missing_store_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read oracles"):
        ManifestStore(tmp_path / "none.jsonl")


def test_store_within_what_jails_are_shown_is_refused(tmp_path: Path) -> None:
    profiles = {"python": ProfileConfig(library_paths=(str(tmp_path),))}
    for oracles in (tmp_path / "oracles", tmp_path, tmp_path.parent):
        with pytest.raises(ConfigError, match="which jails can read"):
            require_hidden(SandboxConfig(profiles=profiles, oracles=str(oracles)))
    with pytest.raises(ConfigError, match="which jails can read"):
        require_hidden(SandboxConfig(oracles=f"{sys.base_prefix}/oracles"))
    require_hidden(SandboxConfig(oracles=str(tmp_path)))
