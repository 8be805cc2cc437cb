"""Each suite of `make suite` is a script that bash can read, and it names files, modules and targets that exist."""

from __future__ import annotations

import re
import subprocess

import pytest

from .suites import ROOT, SUITES, VARIABLES, main

TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_names_what_exists(name: str) -> None:
    script = SUITES[name].script
    subprocess.run(["bash", "-n", "-c", script], check=True, timeout=60)
    assert set(re.findall(r"\bmake ([\w-]+)", script)) <= TARGETS
    for path in re.findall(r"(?<![\w./])tests/[\w./]+", script):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"-m (tests\.\w+)", script):
        assert (ROOT / module.replace(".", "/") / "__main__.py").is_file(), module


def test_the_variables_are_those_of_the_makefile() -> None:
    used = {one for suite in SUITES.values() for one in re.findall(r"\$\{?([A-Z]\w*)", suite.script)}
    assert used <= {*VARIABLES, "PWD", "ROLLMESH_CHROMIUM"}
    (exported,) = re.findall(r"^export ([A-Z ]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*exported.split(), "PYTHON"} == VARIABLES.keys()


def test_the_table_names_each_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed and suite.help in printed for name, suite in SUITES.items())


def test_an_unknown_suite_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["choas"]) == 2
    assert capsys.readouterr().err == "NAME must be a suite, got 'choas'; `make suite` prints them\n"
