"""One session of a judgment: made for it, ended with it, and asked through it.

What the program in it does wrong is a `RunResult`; a session that was lost or closed by somebody else is an infra failure.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.engine import RunResult
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import SandboxFailed, UnknownSession

_LOST = "a session of the judgment was closed under it; judge again"


@dataclass(slots=True, eq=False)
class JudgingSession:
    """An open session. `spent_s` adds up what its questions took, by the service's clock."""

    sessions: Sessions
    clock: Clock
    session_id: str
    alive: bool = True
    spent_s: float = 0.0

    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files. InvalidInput if the session refuses them."""
        try:
            await self.sessions.put_files(self.session_id, files)
        except UnknownSession as error:
            raise SandboxFailed(_LOST, session=self.session_id) from error

    async def run(self, program: Program, wall_s: float = 0.0) -> RunResult:
        """Run source text. InvalidInput for a language this host lacks."""
        began_s = self.clock.monotonic_s()
        try:
            result = await self.sessions.run(self.session_id, program, wall_s)
        except UnknownSession as error:
            raise SandboxFailed(_LOST, session=self.session_id) from error
        return self._noted(result, began_s)

    async def call(self, function: str, *arguments: str, wall_s: float = 0.0) -> RunResult:
        """Call a function. InvalidInput if the session has none of that name."""
        began_s = self.clock.monotonic_s()
        try:
            result = await self.sessions.call(self.session_id, function, arguments, wall_s)
        except UnknownSession as error:
            raise SandboxFailed(_LOST, session=self.session_id) from error
        return self._noted(result, began_s)

    def _noted(self, result: RunResult, began_s: float) -> RunResult:
        self.spent_s += self.clock.monotonic_s() - began_s
        self.alive = self.alive and result.session_alive
        return result


@asynccontextmanager
async def open_session(
    sessions: Sessions, clock: Clock, session_id: str, *, profile: str, limits: Mapping[str, float], owner: str
) -> AsyncIterator[JudgingSession]:
    """A fresh session until the block ends. Raises what opening raises."""
    await sessions.open(session_id, profile=profile, limits=limits, ttl_s=0, owner=owner)
    try:
        yield JudgingSession(sessions, clock, session_id)
    finally:
        await sessions.close(session_id)
