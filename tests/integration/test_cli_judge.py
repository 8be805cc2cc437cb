"""`rollmesh judge`: verdicts of a manifest on this host, as text and JSON."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from rollmesh.cli.__main__ import app

MANIFEST = {"kind": "function", "function": "f", "tests": [{"name": "zero", "arguments": [0], "expected": 0},
                                                          {"name": "two", "arguments": [2], "expected": 4}]}  # fmt: skip


def judge(tmp_path: Path, source: str, *options: str) -> tuple[int, str]:
    (tmp_path / "m.json").write_text(json.dumps(MANIFEST))
    (tmp_path / "mine.py").write_text(source)
    result = CliRunner().invoke(app, ["judge", str(tmp_path / "m.json"), str(tmp_path / "mine.py"), *options])
    return result.exit_code, result.output


def test_judge_prints_a_verdict_per_test_and_fails_unless_all_are_accepted(tmp_path: Path) -> None:
    status, output = judge(tmp_path, "def f(x): return x + x")
    assert status == 0
    assert output.splitlines()[-1] == "2 of 2 accepted, share 1.000"
    status, output = judge(tmp_path, "def f(x): return 0")
    lines = output.splitlines()
    assert status == 1
    assert [line.split()[:2] for line in lines[:2]] == [["zero", "AC"], ["two", "WA"]]
    assert lines[2] == "1 of 2 accepted, share 0.500"


def test_judge_tells_machines_the_same(tmp_path: Path) -> None:
    status, output = judge(tmp_path, "def f(x): return 1 / x", "--json")
    report = json.loads(output)
    assert (status, report["num_accepted"], report["accepted_share"]) == (1, 0, 0.0)
    assert [verdict["verdict"] for verdict in report["verdicts"]] == ["RE", "WA"]
    assert report["verdicts"][0]["message"] == "ZeroDivisionError: division by zero"


def test_judge_takes_the_profiles_of_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("sandbox: {profiles: {mine: {prelude: 'OWN = 7'}}}\n")
    manifest = tmp_path / "m.json"
    manifest.write_text(json.dumps(MANIFEST | {"profile": "mine"}))
    (tmp_path / "mine.py").write_text("def f(x): return x * 2")
    command = ["judge", str(manifest), str(tmp_path / "mine.py")]
    result = CliRunner().invoke(app, [*command, "--config", str(tmp_path / "run.yaml")])
    assert (result.exit_code, "2 of 2 accepted" in result.output) == (0, True)
    result = CliRunner().invoke(app, command)
    assert (result.exit_code, "sandbox profile 'mine', which is not configured" in result.output) == (1, True)


def test_judge_names_what_is_wrong_with_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"kind": "function", "function": "f", "tests": [{"arguments": 1}]}')
    result = CliRunner().invoke(app, ["judge", str(tmp_path / "m.json"), str(tmp_path / "m.json")])
    assert result.exit_code == 2
    assert 'field "tests[0].arguments"' in result.output
    result = CliRunner().invoke(app, ["judge", str(tmp_path / "none.json"), str(tmp_path / "m.json")])
    assert (result.exit_code, "cannot read" in result.output) == (2, True)
