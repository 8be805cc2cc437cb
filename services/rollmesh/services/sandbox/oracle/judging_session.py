"""One session of a judgment: created for it, used through it, and ended with it.

An error of the program in it is a `RunResult`. A session that was lost or closed by another caller is an infrastructure
failure.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.engine import RunResult
from rollmesh.services.sandbox.oracle.verdict import CandidateFailed, JudgeVerdict
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import SandboxFailed, UnknownSession

_LOST = "a session of the judgment was closed by another caller; retry the judgment"


@dataclass(slots=True, eq=False, kw_only=True)
class TimeBudget:
    """Time that a candidate may take in one judgment, by the service's clock. Waits for a session do not count."""

    call_s: float
    """Limit of one request, in seconds."""
    total_s: float = math.inf
    """Limit of all requests together, in seconds."""
    spent_s: float = 0.0

    @property
    def exhausted(self) -> bool:
        """Whether the candidate has taken all of its time."""
        return self.spent_s >= self.total_s

    def next_s(self) -> float:
        """Return the limit of the next request. Raises `CandidateFailed` if no time is left."""
        if self.exhausted:
            raise CandidateFailed(JudgeVerdict.TLE, f"the candidate took more than {self.total_s:g} s in all tests")
        return min(self.call_s, self.total_s - self.spent_s)


@dataclass(slots=True, eq=False)
class JudgingSession:
    """An open session. `spent_s` sums the time of its requests, by the service's clock."""

    sessions: Sessions
    clock: Clock
    session_id: str
    alive: bool = True
    spent_s: float = 0.0
    budget: TimeBudget | None = None
    """Limits the requests and is charged with their time, if the candidate's code runs in the session."""

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files. Raises InvalidInput if the session rejects them."""
        try:
            await self.sessions.put_files(self.session_id, files)
        except UnknownSession as error:
            raise SandboxFailed(_LOST, session=self.session_id) from error

    async def run(self, program: Program, wall_s: float = 0.0) -> RunResult:
        """Run source text. Raises InvalidInput for a language that this host lacks, and `CandidateFailed` without
        time in the budget."""
        wall_s = self.budget.next_s() if self.budget is not None else wall_s
        began_s = self.clock.monotonic_s()
        try:
            result = await self.sessions.run(self.session_id, program, wall_s)
        except UnknownSession as error:
            raise SandboxFailed(_LOST, session=self.session_id) from error
        return self._noted(result, began_s)

    async def call(self, function: str, *arguments: str, wall_s: float = 0.0) -> RunResult:
        """Call a function. Raises InvalidInput if the session has no function of that name, and `CandidateFailed`
        without time in the budget."""
        wall_s = self.budget.next_s() if self.budget is not None else wall_s
        began_s = self.clock.monotonic_s()
        try:
            result = await self.sessions.call(self.session_id, function, arguments, wall_s)
        except UnknownSession as error:
            raise SandboxFailed(_LOST, session=self.session_id) from error
        return self._noted(result, began_s)

    def _noted(self, result: RunResult, began_s: float) -> RunResult:
        took_s = self.clock.monotonic_s() - began_s
        self.spent_s += took_s
        if self.budget is not None:
            self.budget.spent_s += took_s
        self.alive = self.alive and result.session_alive
        return result


@asynccontextmanager
async def open_session(
    sessions: Sessions, clock: Clock, session_id: str, *, profile: str, limits: Mapping[str, float], owner: str
) -> AsyncIterator[JudgingSession]:
    """Open a fresh session until the block ends. Raises the errors of `Sessions.open`."""
    await sessions.open(session_id, profile=profile, limits=limits, ttl_s=0, owner=owner)
    try:
        yield JudgingSession(sessions, clock, session_id)
    finally:
        await sessions.close(session_id)
