"""No candidate forges a verdict, with one session per test or one for all; the solution of the task is accepted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.node import SandboxCore
from rollmesh.services.sandbox.oracle.judge import Judge
from rollmesh.services.sandbox.oracle.manifest import Manifest, manifest_of
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.ids import RandomIds

from .forgeries import FUNCTIONS, PROGRAM, PROGRAMS, SOLUTION, UNITS, Forgery

INPUTS = (("abc", 3), ("sandbox", 41), ("zz", 7))
LIMITS = {"wall_s": 1.0, "cpu_s": 1.0, "processes_max": 8, "memory_bytes": 256 << 20}


def expected(text: str, number: int) -> str:
    return f"{sum(map(ord, text)) * number}:{text[::-1]}"


def function_manifest(**changes: Any) -> Manifest:
    tests = [{"arguments": list(pair), "expected": expected(*pair)} for pair in INPUTS]
    return manifest_of({"kind": "function", "function": "mix", "tests": tests, "limits": LIMITS, **changes})


def program_manifest(**changes: Any) -> Manifest:
    tests = [{"stdin": f"{text} {number}\n", "stdout": expected(text, number)} for text, number in INPUTS]
    return manifest_of({"kind": "stdio", "tests": tests, "limits": LIMITS, **changes})


def unit_manifest(**changes: Any) -> Manifest:
    cases = "".join(f"    assertions.assertEqual(mix({t!r}, {n}), {expected(t, n)!r})\n" for t, n in INPUTS[1:])
    source = f"""
import unittest
from solution import mix
assertions = unittest.TestCase()
def test_first():
    assert mix({INPUTS[0][0]!r}, {INPUTS[0][1]}) == {expected(*INPUTS[0])!r}
def test_others():
{cases}
"""
    return manifest_of({"kind": "unit", "source": source, "limits": LIMITS, **changes})


@pytest.fixture
async def judge(tmp_path: Path) -> AsyncIterator[Judge]:
    config, clock, ids = SandboxConfig(grace_s=0.3, judgments_inflight_max=3), SystemClock(), RandomIds()
    async with SandboxCore(config, state_dir=tmp_path, clock=clock, ids=ids) as core:
        yield Judge(core.sessions, config, clock=clock, ids=ids)
        assert core.sessions.counts().live == 0


async def verdicts(judge: Judge, manifest: Manifest, source: str) -> list[str]:
    report = await judge.judge(manifest, {"solution.py": source.encode()})
    return [verdict.verdict.name for verdict in report.verdicts]


async def misjudged(judge: Judge, manifest: Manifest, forgeries: Sequence[Forgery]) -> dict[str, list[str]]:
    found = await asyncio.gather(*(verdicts(judge, manifest, forgery.source) for forgery in forgeries))
    return {
        forgery.name: given
        for forgery, given in zip(forgeries, found, strict=True)
        if not given or not set(given) <= set(forgery.verdicts.split())
    }


@pytest.mark.parametrize("isolate", [True, False])
async def test_solution_is_accepted(judge: Judge, isolate: bool) -> None:
    assert await verdicts(judge, function_manifest(isolate=isolate), SOLUTION) == ["AC"] * 3
    assert await verdicts(judge, program_manifest(isolate=isolate), PROGRAM) == ["AC"] * 3
    assert await verdicts(judge, unit_manifest(isolate=isolate), SOLUTION) == ["AC"] * 2


async def test_no_function_forges_its_first_verdict(judge: Judge) -> None:
    assert await misjudged(judge, function_manifest(stop_at_first_failure=True), FUNCTIONS) == {}


async def test_no_program_forges_its_first_verdict(judge: Judge) -> None:
    assert await misjudged(judge, program_manifest(stop_at_first_failure=True), PROGRAMS) == {}


async def test_no_candidate_forges_the_first_verdict_of_hidden_unit_tests(judge: Judge) -> None:
    assert await misjudged(judge, unit_manifest(stop_at_first_failure=True), UNITS) == {}


@pytest.mark.slow
async def test_no_function_is_accepted_by_hidden_unit_tests(judge: Judge) -> None:
    """Verdicts may differ from those where the function is called without tests in between, but are never AC."""
    anything = [forgery._replace(verdicts="WA RE TLE MLE OLE") for forgery in FUNCTIONS]
    assert await misjudged(judge, unit_manifest(), anything) == {}


@pytest.mark.slow
@pytest.mark.parametrize("isolate", [True, False])
async def test_no_candidate_forges_any_verdict(judge: Judge, isolate: bool) -> None:
    assert await misjudged(judge, function_manifest(isolate=isolate), FUNCTIONS) == {}
    assert await misjudged(judge, program_manifest(isolate=isolate), PROGRAMS) == {}
    assert await misjudged(judge, unit_manifest(isolate=isolate), UNITS) == {}


def test_names_of_forgeries_differ() -> None:
    for forgeries in (FUNCTIONS, PROGRAMS, UNITS):
        assert len({forgery.name for forgery in forgeries}) == len(forgeries)
        assert all("AC" not in forgery.verdicts.split() for forgery in forgeries)
