"""Answer keys of generated families: hidden tests worked out from the reference alone, so that no file has to travel.

    code:SPECIFICATION      calls of the function and what the reference returns
    sql:KEY                 hidden databases, and what the exemplary query answers on each

Collaborators: `rollmesh.shared.families` (what a reference means), the sandbox node that judges by the manifests made here.
"""

from __future__ import annotations

import sqlite3
from typing import Any

from rollmesh.services.reward.item import AnswerKey
from rollmesh.shared.errors import UnknownOracle
from rollmesh.shared.families import code, sql

TEST_CPU_S = 1.0
"""Of one test; a right answer takes a millisecond."""
TEST_WALL_S = 5.0
"""Of one test. Looser than the CPU time: a busy host must not make a right answer late."""

# One session for all tests: they are calls without lasting effects, and a jail for each would cost more than they do.
_JUDGED = {"isolate": False, "limits": {"wall_s": TEST_WALL_S, "cpu_s": TEST_CPU_S}, "time_limits_max": 1}


class CodeOracle:
    """Hidden tests of a function."""

    def resolve(self, rest: str) -> AnswerKey:
        try:
            task = code.code_task(rest)
        except ValueError as err:
            raise UnknownOracle(f"oracle `code`: {err}", oracle_ref=f"code:{rest[:100]}") from None
        tests = [{"arguments": list(test.arguments), "expected": test.expected} for test in task.tests]
        manifest = {"kind": "function", "function": code.ENTRY, "tests": tests, **_JUDGED}
        return AnswerKey(answers=(task.solution,), tests=manifest)


class SqlOracle:
    """Hidden databases of a question."""

    def resolve(self, rest: str) -> AnswerKey:
        try:
            task = sql.sql_task(rest)
        except ValueError as err:
            raise UnknownOracle(f"oracle `sql`: {err}", oracle_ref=f"sql:{rest[:100]}") from None
        tests = [{"setup": script, "rows": _rows(script, task.query)} for script in task.scripts]
        manifest = {"kind": "sql", "ordered": task.ordered, "tests": tests, **_JUDGED}
        return AnswerKey(answers=(task.query,), tests=manifest)


def _rows(script: str, query: str) -> list[list[Any]]:
    """What our own query answers; nothing a model wrote is run here."""
    database = sqlite3.connect(":memory:")
    try:
        database.executescript(script)
        return [list(row) for row in database.execute(query)]
    finally:
        database.close()
