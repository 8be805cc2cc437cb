"""The candidate of a judgment: its files in a separate jail, which gets one request at a time.

The manifest says whether each test gets a fresh session or all tests share one. A session that has exited is replaced
for the next test. A candidate that does not load fails every test, and is not loaded again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Self

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.engine import RunResult
from rollmesh.services.sandbox.oracle.judging_session import JudgingSession, TimeBudget
from rollmesh.services.sandbox.oracle.verdict import CandidateFailed, JudgeVerdict, require_ok
from rollmesh.shared.errors import InvalidInput

OpenSession = Callable[[], AbstractAsyncContextManager[JudgingSession]]
Prepare = Callable[[JudgingSession], Awaitable[None]]
"""Prepares a fresh session with the candidate's files for its first request; raises `CandidateFailed`."""

_PRELUDE = """
from rollmesh.sandbox_runtime.judging.candidate import ask, load
from rollmesh.sandbox_runtime.judging.program import run_program
from rollmesh.sandbox_runtime.judging.remote import contents, invoke, look_up, names
from rollmesh.sandbox_runtime.judging.sql import query
"""


class Candidate:
    """A candidate, used through `ask` and `run`, which raise `CandidateFailed` for everything that the candidate
    causes."""

    def __init__(
        self,
        open_session: OpenSession,
        files: Mapping[str, bytes],
        *,
        entry: str,
        prepare: Prepare | None,
        isolate: bool,
        budget: TimeBudget,
    ) -> None:
        self._open_session = open_session
        self._files = files
        self._entry = entry
        self._prepare_more = prepare
        self._isolate = isolate
        self.budget = budget
        self._session: JudgingSession | None = None
        self._stack = AsyncExitStack()
        self._unusable: CandidateFailed | None = None
        self._spent_s = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    @property
    def spent_s(self) -> float:
        """Seconds that the candidate has taken in this test so far."""
        return self._spent_s + (self._session.spent_s if self._session is not None else 0.0)

    def source(self) -> str:
        """Return the text of the entry file. Raises `CandidateFailed` if it does not exist."""
        try:
            return self._files[self._entry].decode()
        except KeyError:
            raise CandidateFailed(JudgeVerdict.RE, f"the file {self._entry} does not exist") from None
        except UnicodeDecodeError:
            raise CandidateFailed(JudgeVerdict.RE, f"{self._entry} is not UTF-8") from None

    async def ask(self, function: str, *arguments: str) -> RunResult:
        """Call a function of `sandbox_runtime.judging` in the candidate's jail. The candidate controls the result."""
        session = await self._usable()
        try:
            return require_ok(await session.call(function, *arguments))
        except InvalidInput as error:  # it removed our functions from its session
            raise CandidateFailed(JudgeVerdict.RE, str(error)) from None

    async def run(self, program: Program) -> RunResult:
        """Run a separate program. Raises InvalidInput if this host lacks its language."""
        session = await self._usable()
        return require_ok(await session.run(program))

    async def end_test(self) -> float:
        """End a test; end the session if the next test must not share it. Return the seconds that the candidate
        took."""
        spent_s, self._spent_s = self.spent_s, 0.0
        if self._session is not None:
            self._session.spent_s = 0.0
            if self._isolate or not self._session.alive:
                await self._close()
        return spent_s

    async def _usable(self) -> JudgingSession:
        if self._unusable is not None:
            raise self._unusable
        if self._session is not None and not self._session.alive:
            self._spent_s += self._session.spent_s
            await self._close()
        if self._session is None:
            self._session = await self._stack.enter_async_context(self._open_session())
            try:
                await self._prepare(self._session)
            except CandidateFailed as failed:
                self._unusable = failed
                raise
        return self._session

    async def _prepare(self, session: JudgingSession) -> None:
        self.source()
        try:
            await session.put(self._files)
        except InvalidInput as error:
            raise CandidateFailed(JudgeVerdict.RE, f"cannot write its files: {error}") from None
        require_ok(await session.run(Program(code=_PRELUDE)))
        session.spent_s, session.budget = 0.0, self.budget
        if self._prepare_more is not None:
            await self._prepare_more(session)

    async def _close(self) -> None:
        self._session = None
        await self._stack.aclose()


def loading(entry: str) -> Prepare:
    """Return a `Prepare` that imports a file of the candidate as a module."""

    async def load(session: JudgingSession) -> None:
        require_ok(await session.call("load", entry))

    return load
