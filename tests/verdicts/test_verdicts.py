"""Candidates of unusual form get the verdicts that persons assigned; programs behave as under plain Python."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime.languages.registry import present
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.node import SandboxCore
from rollmesh.services.sandbox.oracle.compare import compare_text
from rollmesh.services.sandbox.oracle.judge import Judge
from rollmesh.services.sandbox.oracle.manifest import ManifestError, manifest_of
from rollmesh.services.sandbox.oracle.verdict import HiddenTestResult, JudgeVerdict
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.errors import BrokenOracle

from .benchmarks import STYLES, Form, forms
from .case import Case, require_different_names
from .functions import FUNCTIONS
from .languages import LANGUAGES
from .programs_right import RIGHT
from .programs_wrong import WRONG
from .units_right import RIGHT as UNITS_RIGHT
from .units_wrong import UNITS_WRONG

PROGRAMS = (*RIGHT, *WRONG)
UNITS = (*UNITS_RIGHT, *UNITS_WRONG)
TASTE = {f"{name}, right 1, unittest" for name in ("a callback", "changes its argument", "equal objects")}
"""Right forms that are rejected, because only the candidate's process could decide them (docs/sandbox/judging.md)."""


@pytest.fixture
async def judge(tmp_path: Path) -> AsyncIterator[Judge]:
    config, clock, ids = SandboxConfig(grace_s=0.3, judgments_inflight_max=3), SystemClock(), RandomIds()
    async with SandboxCore(config, state_dir=tmp_path, clock=clock, ids=ids) as core:
        yield Judge(core.sessions, config, clock=clock, ids=ids)
        assert core.sessions.counts().live == 0


async def misjudged(judge: Judge, cases: tuple[Case, ...]) -> dict[str, str]:
    """Return the cases whose verdict or message is unexpected, and the observed ones."""
    require_different_names(cases)

    async def problem(case: Case) -> str:
        try:
            manifest = manifest_of(dict(case.manifest))
            report = await judge.judge(manifest, {manifest.entry: case.source.encode()})
        except (ManifestError, BrokenOracle) as error:
            return f"{type(error).__name__}: {error}"
        if len(report.verdicts) != 1:
            return f"{len(report.verdicts)} tests: {[judged.message for judged in report.verdicts]}"
        return _problem(case, report.verdicts[0])

    found = await asyncio.gather(*map(problem, cases))
    return {case.name: text for case, text in zip(cases, found, strict=True) if text}


def _problem(case: Case, judged: HiddenTestResult) -> str:
    wanted = judged.verdict.name in case.verdict.split() and case.message in judged.message
    leaks = bool(case.secret) and case.secret in judged.message
    return "" if wanted and not leaks else f"{judged.verdict.name} {judged.message}"


async def test_programs(judge: Judge) -> None:
    assert await misjudged(judge, PROGRAMS) == {}


async def test_functions_and_ways_to_compare(judge: Judge) -> None:
    assert await misjudged(judge, FUNCTIONS) == {}


async def test_hidden_unit_tests(judge: Judge) -> None:
    assert await misjudged(judge, UNITS) == {}


@pytest.mark.slow
async def test_other_languages(judge: Judge) -> None:
    here = [case for case in LANGUAGES if case.manifest["language"] in present()]
    if not here:
        pytest.skip("this host has none of the compilers")
    assert await misjudged(judge, tuple(here)) == {}


@pytest.mark.slow
def test_plain_python_accepts_the_same_programs(tmp_path: Path) -> None:
    cases = [case for case in PROGRAMS if case.plain]
    with ThreadPoolExecutor(4) as pool:
        accepted = pool.map(lambda case: accepted_by_plain_python(case, tmp_path), cases)
    assert [case.name for case, plain in zip(cases, accepted, strict=True) if plain != (case.verdict == "AC")] == []


def accepted_by_plain_python(case: Case, folder: Path) -> bool:
    """Return whether the interpreter runs the program to status 0 with the output that the hidden test expects."""
    (test,) = case.manifest["tests"]
    folder = Path(tempfile.mkdtemp(dir=folder))
    (folder / "solution.py").write_bytes(case.source.encode())
    (folder / "stdin").write_text(test["stdin"])
    with (folder / "stdin").open("rb") as stdin:
        done = subprocess.run(
            [sys.executable, "-X", "utf8", str(folder / "solution.py")],
            stdin=stdin, capture_output=True, timeout=60, cwd=folder, check=False, env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
    output = done.stdout.decode("utf-8", "replace")
    return done.returncode == 0 and compare_text(test["stdout"], output, "exact", 0.0) is JudgeVerdict.AC


async def verdicts_of(judge: Judge, corpus: Sequence[Form]) -> list[str]:
    """Return the verdict of each form: AC if all hidden tests are accepted, otherwise the first other one, or an
    error."""

    async def verdict(form: Form) -> str:
        try:
            manifest = manifest_of(form.manifest)
            report = await judge.judge(manifest, {manifest.entry: form.source.encode()})
        except (ManifestError, BrokenOracle) as error:
            return f"{type(error).__name__}: {error}"
        return next(
            (f"{v.verdict.name} {v.message}" for v in report.verdicts if v.verdict is not JudgeVerdict.AC), "AC"
        )

    return await asyncio.gather(*map(verdict, corpus))


def passes_in_plain_python(form: Form, folder: Path) -> bool:
    """Return whether the tests of a form pass in one process with the solution."""
    folder = Path(tempfile.mkdtemp(dir=folder))
    (folder / "solution.py").write_text(form.source)
    (folder / "run_tests.py").write_text(form.plain + "\nprint('passed')\n")
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "run_tests.py"], stdin=subprocess.DEVNULL, capture_output=True, timeout=60,
        cwd=folder, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    return done.returncode == 0 and done.stdout.endswith(b"passed\n")


async def test_core_of_the_forms_of_benchmarks(judge: Judge) -> None:
    core = [form for form in forms() if form.name not in TASTE][::17]
    assert {form.style for form in core} == set(STYLES)
    given = await verdicts_of(judge, core)
    assert [(f.name, v) for f, v in zip(core, given, strict=True) if (v == "AC") != f.right] == []


@pytest.mark.slow
async def test_forms_of_benchmarks(judge: Judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = forms()
    assert len({form.name for form in corpus}) == len(corpus) >= 300
    given = await verdicts_of(judge, corpus)
    with ThreadPoolExecutor(2) as pool:
        plain = list(pool.map(lambda form: passes_in_plain_python(form, tmp_path), corpus))
    assert [form.name for form, passes in zip(corpus, plain, strict=True) if passes != form.right] == []
    rejected = [(f, v) for f, v in zip(corpus, given, strict=True) if f.right and v != "AC"]
    accepted = [f.name for f, v in zip(corpus, given, strict=True) if not f.right and v == "AC"]
    with capsys.disabled():
        print("\n| style | forms | right | right rejected | wrong accepted |\n| --- | --- | --- | --- | --- |")
        for style in STYLES:
            right = sum(form.right for form in corpus if form.style == style)
            counts = (
                sum(form.style == style for form in corpus), right, sum(form.style == style for form, _ in rejected),
                sum(form.style == style for form in corpus if form.name in accepted),
            )  # fmt: skip
            print(f"| {style} | {' | '.join(map(str, counts))} |")
        for form, verdict in rejected:
            print(f"right rejected: {form.name}: {verdict}")
    assert accepted == []
    assert {form.name for form, _ in rejected} <= TASTE
    assert len(rejected) <= 0.02 * sum(form.right for form in corpus)
