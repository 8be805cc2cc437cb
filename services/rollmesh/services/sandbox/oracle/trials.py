"""Run one test on a candidate: return if it is accepted, otherwise raise `CandidateFailed`."""

from __future__ import annotations

import json
import signal
from typing import Any

from rollmesh.sandbox_runtime.program import PYTHON, Program
from rollmesh.services.sandbox.engine import RunResult
from rollmesh.services.sandbox.oracle.candidate import Candidate
from rollmesh.services.sandbox.oracle.checking import CheckerSession
from rollmesh.services.sandbox.oracle.compare import compare_text, off_loop, same_value, strict_json
from rollmesh.services.sandbox.oracle.manifest import FunctionManifest, FunctionTest, StdioManifest, StdioTest
from rollmesh.services.sandbox.oracle.verdict import CandidateFailed, JudgeVerdict

_SIGNALS = {-signal.SIGXCPU: JudgeVerdict.TLE, -signal.SIGKILL: JudgeVerdict.MLE}
"""Verdict by exit status. Within the session only the kernel sends SIGKILL, for memory, or the program itself."""


async def try_function(
    manifest: FunctionManifest, test: FunctionTest, candidate: Candidate, checker: CheckerSession | None
) -> None:
    """Call the function and compare the result that it reports."""
    result = await candidate.ask("ask", manifest.function, json.dumps(test.arguments))
    length, tolerance = len(result.result), manifest.tolerance if manifest.compare == "numbers" else 0.0
    answer = await off_loop(length, lambda: read_answer(result))
    if checker is not None:
        await checker.check(test.arguments, test.expected, answer)
    elif not await off_loop(length, lambda: same_value(test.expected, answer, tolerance)):
        raise CandidateFailed(JudgeVerdict.WA, "the result differs from the expected one")


async def try_stdio(
    manifest: StdioManifest, test: StdioTest, candidate: Candidate, checker: CheckerSession | None, cpu_s: float
) -> None:
    """Run the program and compare its output."""
    output = await _printed(manifest, test, candidate, cpu_s)
    if checker is not None:
        await checker.check(test.stdin, test.stdout, output)
        return
    verdict = await off_loop(
        len(output), lambda: compare_text(test.stdout, output, manifest.compare, manifest.tolerance)
    )
    if verdict is JudgeVerdict.PE:
        raise CandidateFailed(verdict, "the output differs from the expected one in white space only")
    if verdict is not JudgeVerdict.AC:
        raise CandidateFailed(verdict, "the output differs from the expected one")


def read_answer(result: RunResult) -> Any:
    """Return the JSON value of the candidate's reply. Raises `CandidateFailed` for anything else."""
    try:
        return strict_json(result.result)
    except ValueError as error:
        if result.truncated:
            raise CandidateFailed(JudgeVerdict.OLE, "the result is longer than the limit") from None
        raise CandidateFailed(JudgeVerdict.WA, f"the result is not a JSON value: {error}") from None


async def _printed(manifest: StdioManifest, test: StdioTest, candidate: Candidate, cpu_s: float) -> str:
    if manifest.language == PYTHON:
        result = await candidate.ask("run_program", manifest.entry, test.stdin, str(cpu_s))
        _require_success(result)
    else:
        program = Program(language=manifest.language, code=candidate.source(), stdin=test.stdin.encode())
        result = await candidate.run(program)
    if result.truncated:
        raise CandidateFailed(JudgeVerdict.OLE, "the output exceeds the limit")
    return result.stdout


def _require_success(result: RunResult) -> None:
    answer = read_answer(result)
    status = answer.get("status") if isinstance(answer, dict) else None
    if type(status) is not int:
        raise CandidateFailed(JudgeVerdict.RE, "the session's protocol was broken")
    if status == 0:
        return
    if result.truncated:
        raise CandidateFailed(JudgeVerdict.OLE, "the output exceeds the limit")
    how = f"signal {-status}" if status < 0 else f"status {status}"
    last_line = _last_line(result.stderr)
    verdict = JudgeVerdict.MLE if last_line.startswith("MemoryError") else _SIGNALS.get(status, JudgeVerdict.RE)
    raise CandidateFailed(verdict, f"the program ended with {how}: {last_line or 'nothing on stderr'}")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
