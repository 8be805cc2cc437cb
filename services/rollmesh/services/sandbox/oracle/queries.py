"""Judge SQL queries: the candidate's runs in its session, the reference in another, and the service compares the
rows."""

from __future__ import annotations

from typing import Any

from rollmesh.sandbox_runtime import result_sets
from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.engine import RunOutcome
from rollmesh.services.sandbox.oracle.candidate import Candidate, OpenSession
from rollmesh.services.sandbox.oracle.compare import off_loop, strict_json
from rollmesh.services.sandbox.oracle.manifest import SqlManifest, SqlTest
from rollmesh.services.sandbox.oracle.trials import read_answer
from rollmesh.services.sandbox.oracle.verdict import CandidateFailed, JudgeVerdict
from rollmesh.shared.errors import BrokenOracle

_PRELUDE = "from rollmesh.sandbox_runtime.judging.sql import query"
Rows = list[list[Any]]


async def try_sql(manifest: SqlManifest, test: SqlTest, candidate: Candidate, open_oracle: OpenSession) -> None:
    """Run the query on the test's database and compare the rows that it reports."""
    result = await candidate.ask("query", test.setup, candidate.source())
    given = await off_loop(len(result.result), lambda: _rows(read_answer(result)))
    expected = test.rows if test.rows is not None else await _gold_rows(manifest, test, open_oracle)
    same = await off_loop(
        len(result.result),
        lambda: result_sets.same(
            expected,
            given,
            ordered=manifest.ordered,
            tolerance=manifest.tolerance,
            columns=manifest.columns,
            duplicates=manifest.duplicates,
        ),
    )
    if not same:
        raise CandidateFailed(JudgeVerdict.WA, "the rows differ from the expected ones")


async def _gold_rows(manifest: SqlManifest, test: SqlTest, open_oracle: OpenSession) -> Rows:
    async with open_oracle() as cell:
        result = await cell.run(Program(code=_PRELUDE))
        if result.outcome is RunOutcome.OK:
            result = await cell.call("query", test.setup, manifest.gold)
    try:
        if result.outcome is RunOutcome.OK:
            return _rows(strict_json(result.result))
        cause = f"{result.error_type}: {result.error_message}"
    except (CandidateFailed, ValueError):
        cause = "its rows are too long"
    raise BrokenOracle(f"the reference query does not run: {cause}; fix the manifest")


def _rows(reply: Any) -> Rows:
    """Check that a reply has rows of flat cells. Raises `CandidateFailed` for any other shape: only our own code
    replies from that session, unless a query broke out of it."""
    rows = reply.get("rows") if isinstance(reply, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) and all(map(_is_cell, row)) for row in rows):
        raise CandidateFailed(JudgeVerdict.RE, "the session's protocol was broken")
    return rows


def _is_cell(cell: Any) -> bool:
    if isinstance(cell, dict):
        return len(cell) == 1 and all(isinstance(value, str) for value in cell.values())
    return cell is None or type(cell) in (int, float, str)
