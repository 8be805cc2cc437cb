"""FAKE engine: NO ISOLATION. It runs the calculator in the service's process, for fast tests.

It evaluates only `call(text)` of the calculator profile, whose grammar is harmless, and never executes Python. `run`
takes an expression that the calculator accepts. It is deterministic and ignores limits and time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.program import Program
from rollmesh.sandbox_runtime.tools import calc
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engine import (
    CallsDone,
    FunctionCall,
    OnOutput,
    PoolCounts,
    RunOutcome,
    RunResult,
    SandboxEngine,
    SavePiece,
    SnapshotTooLarge,
)
from rollmesh.shared.domain.decoding import UNDECODABLE
from rollmesh.shared.errors import InvalidInput, UnknownProfile, UnknownSession

PROFILE = "calc"

_decoder = msgspec.msgpack.Decoder(dict[str, bytes])


class FakeSandboxEngine(SandboxEngine):
    """Implements `SandboxEngine` without isolation. Never use it for code that a model wrote."""

    def __init__(self, config: SandboxConfig, **_: object) -> None:
        self._config = config
        self._files: dict[str, dict[str, bytes]] = {}

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        self._files.clear()

    @property
    def num_queued(self) -> int:
        return 0

    def pool_counts(self) -> PoolCounts:
        return PoolCounts()

    def limits(self, profile: str) -> Limits:
        if profile != PROFILE:
            raise UnknownProfile(f"the fake engine has only the profile {PROFILE!r}, not {profile!r}", profile=profile)
        return self._config.profiles[PROFILE].resolved_limits()

    async def open(
        self,
        session_id: str,
        profile: str,
        limits: Limits,
        snapshot: AsyncIterator[bytes] | None = None,
        *,
        tenant: str = "",
    ) -> None:
        self.limits(profile)
        assert session_id not in self._files
        files: dict[str, bytes] = {}
        if snapshot is not None:
            try:
                files = _decoder.decode(b"".join([piece async for piece in snapshot]))
            except UNDECODABLE as error:
                raise InvalidInput(f"the snapshot does not load: {error}", session=session_id) from error
        self._files[session_id] = files

    async def snapshot(self, session_id: str, bytes_max: int, save: SavePiece) -> tuple[str, ...]:
        saved = msgspec.msgpack.encode(self._find(session_id))
        if len(saved) > bytes_max:
            raise SnapshotTooLarge
        await save(saved)
        return ()

    async def run(
        self, session_id: str, program: Program, wall_s: float, on_output: OnOutput | None = None
    ) -> RunResult:
        self._find(session_id)
        value = calc.call(program.code)
        if value == calc.REFUSED:
            message = "the fake engine evaluates one arithmetic operation and nothing else"
            return RunResult(outcome=RunOutcome.ERROR, error_type="SyntaxError", error_message=message)
        return RunResult(outcome=RunOutcome.OK, result=value)

    async def call(self, session_id: str, function: str, arguments: Sequence[str], wall_s: float) -> RunResult:
        self._find(session_id)
        if function != "call":
            raise InvalidInput(f"no function {function!r} in this session", session=session_id)
        if len(arguments) != 1:
            message = f"call() takes 1 positional argument but {len(arguments)} were given"
            return RunResult(outcome=RunOutcome.ERROR, error_type="TypeError", error_message=message)
        return RunResult(outcome=RunOutcome.OK, result=calc.call(arguments[0]))

    async def call_all(self, session_id: str, calls: Sequence[FunctionCall], slice_s: float) -> CallsDone:
        results: list[RunResult | InvalidInput] = []
        for call in calls:
            try:
                results.append(await self.call(session_id, call.function, call.arguments, call.wall_s))
            except InvalidInput as error:
                results.append(error)
        return CallsDone(results=results)

    async def put_files(self, session_id: str, files: Mapping[str, bytes]) -> None:
        self._find(session_id).update(files)

    async def get_files(self, session_id: str, paths: Sequence[str], bytes_max: int) -> dict[str, bytes]:
        held = self._find(session_id)
        for path in paths:
            if path not in held:
                raise InvalidInput(f"{path}: no such file", session=session_id)
        found = {path: held[path] for path in paths}
        if sum(map(len, found.values())) > bytes_max:
            raise InvalidInput(f"the files asked for exceed {bytes_max} bytes together", session=session_id)
        return found

    async def end(self, session_id: str) -> None:
        self._files.pop(session_id, None)

    def _find(self, session_id: str) -> dict[str, bytes]:
        if session_id not in self._files:
            raise UnknownSession(f"no session {session_id!r} here: it was closed or expired; open a new one")
        return self._files[session_id]
