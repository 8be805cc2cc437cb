"""The candidate of a judgment: its files in a jail of their own, asked one question at a time.

A fresh session for each test, or one for all, as the manifest says; a session that died is replaced for the next test. A candidate
that does not load fails every test alike, and is not loaded again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from types import TracebackType
from typing import Self

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.engine import RunResult
from rollmesh.services.sandbox.oracle.judging_session import JudgingSession
from rollmesh.services.sandbox.oracle.verdict import CandidateFailed, JudgeVerdict, require_ok
from rollmesh.shared.errors import InvalidInput

OpenSession = Callable[[], AbstractAsyncContextManager[JudgingSession]]
Prepare = Callable[[JudgingSession], Awaitable[None]]
"""What a fresh session with the candidate's files needs before its first question; raises `CandidateFailed`."""

_PRELUDE = """
from rollmesh.sandbox_runtime.judging.candidate import ask, load
from rollmesh.sandbox_runtime.judging.program import run_program
from rollmesh.sandbox_runtime.judging.remote import contents, invoke, look_up
from rollmesh.sandbox_runtime.judging.sql import query
"""


class Candidate:
    """Asked through `ask` and `run`, which raise `CandidateFailed` for whatever is the candidate's doing."""

    def __init__(
        self,
        open_session: OpenSession,
        files: Mapping[str, bytes],
        *,
        entry: str,
        prepare: Prepare | None,
        isolate: bool,
    ) -> None:
        self._open_session = open_session
        self._files = files
        self._entry = entry
        self._prepare_more = prepare
        self._isolate = isolate
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
        """Seconds that the candidate took in this test so far."""
        return self._spent_s + (self._session.spent_s if self._session is not None else 0.0)

    def source(self) -> str:
        """Text of the entry. `CandidateFailed` if there is none."""
        try:
            return self._files[self._entry].decode()
        except KeyError:
            raise CandidateFailed(JudgeVerdict.RE, f"there is no file {self._entry}") from None
        except UnicodeDecodeError:
            raise CandidateFailed(JudgeVerdict.RE, f"{self._entry} is not UTF-8") from None

    async def ask(self, function: str, *arguments: str) -> RunResult:
        """Call a function of the jail's side. The result is what the candidate says, whatever it is."""
        session = await self._usable()
        try:
            return require_ok(await session.call(function, *arguments))
        except InvalidInput as error:  # it threw our side out of its session
            raise CandidateFailed(JudgeVerdict.RE, str(error)) from None

    async def run(self, program: Program) -> RunResult:
        """Run a program of its own. InvalidInput if this host lacks its language."""
        session = await self._usable()
        return require_ok(await session.run(program))

    async def end_test(self) -> float:
        """After each test: ends the session if the next may not have it. The seconds the candidate took."""
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
            raise CandidateFailed(JudgeVerdict.RE, f"its files could not be written: {error}") from None
        require_ok(await session.run(Program(code=_PRELUDE)))
        session.spent_s = 0.0
        if self._prepare_more is not None:
            await self._prepare_more(session)

    async def _close(self) -> None:
        self._session = None
        await self._stack.aclose()


def loading(entry: str) -> Prepare:
    """Import a file of the candidate's as a module."""

    async def load(session: JudgingSession) -> None:
        require_ok(await session.call("load", entry))

    return load
