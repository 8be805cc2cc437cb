"""The engine port: what the sandbox service asks of whatever contains foreign code.

An engine makes, uses and ends sessions; it knows nothing of owners, leases and streams. One conformance suite
(`tests/conformance/test_sandbox_engine.py`) runs on every engine. What a program did, good or bad, is a `RunResult`; what
went wrong with the jail itself is `SandboxFailed`: an infra failure, never held against the program.

Every method runs on the event loop, must not block it, and ends within the limits of the session plus a grace. Cancelling a
`run` or `call` ends the session, since its state is then unknown.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.program import Program

SavePiece = Callable[[bytes], Awaitable[None]]
"""Takes the bytes of a snapshot, one piece at a time."""


class SnapshotTooLarge(Exception):
    """The session does not fit into the bytes allowed. `Snapshots` knows whose fault that is."""


class RunOutcome(Enum):
    """How a piece of code ended. All of these are the program's own doing."""

    OK = "ok"
    ERROR = "error"
    """It raised."""
    TIME = "time"
    """Wall or CPU time used up."""
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"
    """It printed more than the flood limit."""
    EXITED = "exited"
    """It ended its own session: os._exit, a fatal signal, or garbage on the session's socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What one piece of code did. Texts are cut at the session's `output_bytes` and `truncated` then says so."""

    outcome: RunOutcome
    stdout: str = ""
    stderr: str = ""
    result: str = ""
    """repr of the last expression (run) or the returned text (call); empty for None."""
    error_type: str = ""
    error_message: str = ""
    traceback: str = ""
    """With the user's own line numbers and source lines."""
    truncated: bool = False
    wall_s: float = 0.0
    """Seconds inside the jail."""
    cpu_s: float = 0.0
    """CPU seconds of the interpreter or the program, and of those of its children that it has waited for."""
    exit_status: int = 0
    """Of the program, or minus the signal that ended it; 0 where the language has none."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Those of `Program.return_paths` that exist as regular files, cut at the node's limit; `truncated` then says so."""
    session_alive: bool = True


OnOutput = Callable[[int, str], None]
"""Gets a piece of output: its descriptor (1 or 2) and its text. Must not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """Sessions kept ready ahead of demand. made = taken + dropped + the sum of `ready`."""

    ready: Mapping[str, int] = field(default_factory=dict)
    """Now, by profile."""
    made: int = 0
    taken: int = 0
    """Opens that found one ready."""
    missed: int = 0
    """Opens that one would have served and that found none."""
    dropped: int = 0
    """Ended unused: no longer wanted, their place wanted, or lost with their zygote."""


class SandboxEngine(Protocol):
    """Sessions by id. Ids are the caller's and unique among live sessions."""

    async def start(self) -> None:
        """Make ready and clear what an earlier life left. Raises SandboxFailed where this host can't contain."""
        ...

    async def close(self) -> None:
        """End every session; nothing of them is left when this returns."""
        ...

    @property
    def num_queued(self) -> int:
        """Sessions that wait for their turn to be made."""
        ...

    def pool_counts(self) -> PoolCounts:
        """Of sessions kept ready; all zero where none are."""
        ...

    def limits(self, profile: str) -> Limits:
        """A profile's limits, which are also the most a session may ask for. Raises UnknownProfile."""
        ...

    async def open(
        self,
        session_id: str,
        profile: str,
        limits: Limits,
        snapshot: AsyncIterator[bytes] | None = None,
        *,
        tenant: str = "",
    ) -> None:
        """A fresh session, brought to the state of a snapshot of the same profile if one is given. Where starts must wait for
        each other, tenants take turns; egress counts against the tenant's rate.

        Raises SandboxFailed if the jail can't be made, Overloaded without a free place, InvalidInput for a snapshot that does not
        load, and what `snapshot` raises; no session is left then.
        """
        ...

    async def snapshot(self, session_id: str, bytes_max: int, save: SavePiece) -> tuple[str, ...]:
        """Hand the session's files and python state to `save`, opaque bytes, at most `bytes_max`; the session goes on.

        Returns what could not be saved. Raises SnapshotTooLarge, InvalidInput, UnknownSession, SandboxFailed, and what
        `save` raises, which ends the session.
        """
        ...

    async def run(
        self, session_id: str, program: Program, wall_s: float, on_output: OnOutput | None = None
    ) -> RunResult:
        """Execute source text; `on_output` gets what it prints, as far as it is kept, while it prints it. Raises SandboxFailed if the jail was lost, UnknownSession, InvalidInput for a language not here."""
        ...

    async def call(self, session_id: str, function: str, arguments: Sequence[str], wall_s: float) -> RunResult:
        """Call a function that the profile or earlier code defined. Also raises InvalidInput if there is none."""
        ...

    async def put_files(self, session_id: str, files: Mapping[str, bytes]) -> None:
        """Write files by relative path. Raises InvalidInput if the session refuses them (full, not a directory, ...)."""
        ...

    async def get_files(self, session_id: str, paths: Sequence[str], bytes_max: int) -> dict[str, bytes]:
        """Read files. Raises InvalidInput for a missing one or more than `bytes_max` bytes together."""
        ...

    async def end(self, session_id: str) -> None:
        """End a session and all its processes; unknown ids are ignored. Nothing of it is left when this returns."""
        ...
