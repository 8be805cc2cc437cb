"""Answer keys of generated families: hidden tests worked out from the reference alone, so that no file has to travel.

    code:SPECIFICATION      calls of the function and what the reference returns
    sql:KEY                 hidden databases, and what the exemplary query answers on each

Collaborators: `rollmesh.shared.families` (what a reference means), the sandbox node that judges by the manifests made here.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any

from rollmesh.services.reward.item import AnswerKey
from rollmesh.shared.errors import UnknownOracle
from rollmesh.shared.families import code, sql

TEST_CPU_S = 1.0
"""Of one test; a right answer takes a millisecond."""
TEST_WALL_S = 5.0
"""Of one test. Looser than the CPU time: a busy host must not make a right answer late."""
QUERY_FUNCTION = "run"
"""What a file that runs a query defines: `run(script, ordered)` makes the database and returns the rows of the query beside it."""


class CodeOracle:
    """Hidden tests of a function."""

    def resolve(self, rest: str) -> AnswerKey:
        try:
            task = code.code_task(rest)
        except ValueError as err:
            raise UnknownOracle(f"oracle `code`: {err}", oracle_ref=f"code:{rest[:100]}") from None
        tests = [(list(test.arguments), test.expected) for test in task.tests]
        return AnswerKey(answers=(task.solution,), tests=_manifest(code.ENTRY, tests))


class SqlOracle:
    """Hidden databases of a question."""

    def resolve(self, rest: str) -> AnswerKey:
        try:
            task = sql.sql_task(rest)
        except ValueError as err:
            raise UnknownOracle(f"oracle `sql`: {err}", oracle_ref=f"sql:{rest[:100]}") from None
        tests = [([script, task.ordered], _answer(script, task.query, task.ordered)) for script in task.scripts]
        return AnswerKey(answers=(task.query,), tests=_manifest(QUERY_FUNCTION, tests))


def _manifest(function: str, tests: Sequence[tuple[list[Any], Any]]) -> dict[str, object]:
    # One session for all tests: they are calls without lasting effects, and a jail for each would cost more than they do.
    return {
        "kind": "function",
        "function": function,
        "isolate": False,
        "limits": {"wall_s": TEST_WALL_S, "cpu_s": TEST_CPU_S},
        "time_limits_max": 1,
        "tests": [{"arguments": arguments, "expected": expected} for arguments, expected in tests],
    }


def _answer(script: str, query: str, ordered: bool) -> list[list[Any]]:
    """What our own query answers; nothing a model wrote is run here."""
    database = sqlite3.connect(":memory:")
    try:
        database.executescript(script)
        rows = [list(row) for row in database.execute(query)]
    finally:
        database.close()
    return rows if ordered else sorted(rows, key=repr)
