"""The oracle's jail for checkers. It contains the operator's code and the candidate's answers as data, never code of
the candidate.

If a checker fails on an answer (exception, timeout, out of memory), the answer is rejected: the candidate chose it and
must not gain a retry. A checker that does not load is an error of the operator and gives no verdict.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.engine import RunOutcome, RunResult
from rollmesh.services.sandbox.oracle.candidate import OpenSession
from rollmesh.services.sandbox.oracle.compare import strict_json
from rollmesh.services.sandbox.oracle.judging_session import JudgingSession, TimeBudget
from rollmesh.services.sandbox.oracle.manifest import Checker
from rollmesh.services.sandbox.oracle.verdict import CandidateFailed, JudgeVerdict
from rollmesh.shared.errors import BrokenOracle

_WRAP = "from rollmesh.sandbox_runtime.judging.checking import wrap as _wrap\n_checked = _wrap(check)"


class CheckerSession:
    """A checker session, loaded once and called for each answer; replaced if an answer ended it."""

    def __init__(self, open_session: OpenSession, checker: Checker, budget: TimeBudget) -> None:
        """A rejected answer is charged to the candidate's `budget` with the time of its check."""
        self._open_session = open_session
        self._checker = checker
        self._budget = budget
        self._session: JudgingSession | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def check(self, given: Any, expected: Any, answer: Any) -> None:
        """Raise `CandidateFailed` with WA unless the checker accepts. Raises BrokenOracle if the checker does not
        load."""
        session = await self._loaded()
        text, spent_s = json.dumps([given, expected, answer]), session.spent_s
        accept, message = _read(await session.call("_checked", text, wall_s=self._checker.wall_s))
        if not accept:
            self._budget.spent_s += session.spent_s - spent_s
            raise CandidateFailed(JudgeVerdict.WA, message)

    async def _loaded(self) -> JudgingSession:
        if self._session is not None and self._session.alive:
            return self._session
        await self._stack.aclose()
        self._session = await self._stack.enter_async_context(self._open_session())
        for code in (self._checker.source, _WRAP):
            result = await self._session.run(Program(code=code))
            if result.outcome is not RunOutcome.OK:
                raise BrokenOracle(
                    f"the checker does not load: {result.error_type}: {result.error_message}; fix the manifest"
                )
        return self._session


def _read(result: RunResult) -> tuple[bool, str]:
    if result.outcome is not RunOutcome.OK:
        # The message is omitted, because it may quote the expected answer.
        return False, f"the checker could not judge the answer ({result.error_type})"
    try:
        reply = strict_json(result.result)
        return reply["accept"] is True, str(reply["message"])
    except (ValueError, TypeError, KeyError):
        return False, "the checker's verdict was too long"
