"""The oracle's jail for checkers: the operator's code and, as data, what the candidate answered. No candidate's code enters it.

What a checker does on an answer it can't handle (raise, hang, run out of memory) is a rejection: the candidate chose the answer,
and must not gain a second try by it. A checker that does not even load is the operator's, and no verdict at all.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.engine import Outcome, RunResult
from rollmesh.services.sandbox.oracle.candidate import OpenCell
from rollmesh.services.sandbox.oracle.cell import Cell
from rollmesh.services.sandbox.oracle.compare import strict_json
from rollmesh.services.sandbox.oracle.manifest import Checker
from rollmesh.services.sandbox.oracle.verdict import Failed, Verdict
from rollmesh.shared.errors import BrokenOracle

_WRAP = "from rollmesh.sandbox_runtime.judging.checking import wrap as _wrap\n_checked = _wrap(check)"


class CheckerCell:
    """A checker, loaded once and asked for each answer; replaced when an answer killed it."""

    def __init__(self, open_cell: OpenCell, checker: Checker) -> None:
        self._open_cell = open_cell
        self._checker = checker
        self._cell: Cell | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def check(self, given: Any, expected: Any, answer: Any) -> None:
        """`Failed` with WA unless the checker accepts. BrokenOracle if it does not load."""
        cell = await self._loaded()
        text = json.dumps([given, expected, answer])
        accept, message = _read(await cell.call("_checked", text, wall_s=self._checker.wall_s))
        if not accept:
            raise Failed(Verdict.WA, message)

    async def _loaded(self) -> Cell:
        if self._cell is not None and self._cell.alive:
            return self._cell
        await self._stack.aclose()
        self._cell = await self._stack.enter_async_context(self._open_cell())
        for code in (self._checker.source, _WRAP):
            result = await self._cell.run(Program(code=code))
            if result.outcome is not Outcome.OK:
                raise BrokenOracle(
                    f"the checker does not load: {result.error_type}: {result.error_message}; mend the manifest"
                )
        return self._cell


def _read(result: RunResult) -> tuple[bool, str]:
    if result.outcome is not Outcome.OK:
        # Not the message: it may quote the expected answer.
        return False, f"the checker could not judge the answer ({result.error_type})"
    try:
        said = strict_json(result.result)
        return said["accept"] is True, str(said["message"])
    except (ValueError, TypeError, KeyError):
        return False, "the checker's verdict was too long"
