"""The engine port: the interface between the sandbox service and an implementation that contains foreign code.

An engine creates, uses and ends sessions. It does not know owners, leases or streams. One conformance suite
(`tests/conformance/test_sandbox_engine.py`) runs on every engine. A `RunResult` describes what a program did.
`SandboxFailed` reports an error of the jail, which is an infrastructure failure and never counts against the program.

Every method runs on the event loop, does not block it, and ends within the limits of the session plus a grace period.
Cancelling a `run` or `call` ends the session, because its state is then unknown.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.program import Program
from rollmesh.shared.config.plugin import Plugin, required, required_attribute
from rollmesh.shared.config.registry import Registry
from rollmesh.shared.errors import InvalidInput

SavePiece = Callable[[bytes], Awaitable[None]]
"""Callback that stores one piece of a snapshot."""


class SnapshotTooLarge(Exception):
    """The session exceeds the allowed bytes. `Snapshots` decides which quota is the cause."""


class RunOutcome(Enum):
    """How a command ended. All outcomes are caused by the program itself."""

    OK = "ok"
    ERROR = "error"
    """It raised an exception or exited with a non-zero status."""
    TIME = "time"
    """It used up its wall or CPU time."""
    MEMORY = "memory"
    PROCESSES = "processes"
    OUTPUT = "output"
    """It printed more than the flood limit."""
    EXITED = "exited"
    """It ended its session by os._exit, a fatal signal, or invalid data on the session's socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of one command. Texts are cut at the session's `output_bytes`, and `truncated` is then True."""

    outcome: RunOutcome
    stdout: str = ""
    stderr: str = ""
    result: str = ""
    """repr of the last expression (run) or the returned text (call); empty for None."""
    error_type: str = ""
    error_message: str = ""
    traceback: str = ""
    """With the line numbers and source lines of the user's code."""
    truncated: bool = False
    wall_s: float = 0.0
    """Seconds inside the jail."""
    cpu_s: float = 0.0
    """CPU seconds of the interpreter or program and of the children that it has reaped."""
    exit_status: int = 0
    """Exit status of the program, or minus the signal that ended it; 0 if the language has no exit status."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The files of `Program.return_paths` that exist as regular files, cut at the limit of the node; `truncated` is
    then True."""
    session_alive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A call of a function of a profile."""

    function: str
    arguments: Sequence[str]
    wall_s: float
    """Time limit in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsDone:
    """Result of a sequence of stateless calls in one session."""

    results: Sequence[RunResult | InvalidInput] = ()
    """Results of the first calls, in order. The other calls were not begun. InvalidInput if the function does not
    exist."""
    changed: str = ""
    """State that the last of these calls left in the session, e.g. "global name 'total'"; empty if none was found."""
    end: RunResult | None = None
    """How the session ended during these calls. It is not known which one was the cause, and `results` is empty."""


OnOutput = Callable[[int, str], None]
"""Callback for a piece of output: descriptor (1 or 2) and text. It must not block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCounts:
    """Counters of ready sessions. made = taken + dropped + the sum of `ready`."""

    ready: Mapping[str, int] = field(default_factory=dict)
    """Current number by profile."""
    made: int = 0
    taken: int = 0
    """Opens that got a ready session."""
    missed: int = 0
    """Opens that a ready session could have served, but none existed."""
    dropped: int = 0
    """Ready sessions that ended unused: no longer needed, evicted for their slot, or lost with their zygote."""


class SandboxEngine(Plugin):
    """Base of sandbox engines: sessions by id. The caller chooses ids, which are unique among live sessions."""

    @required
    async def start(self) -> None:
        """Start the engine and clean up after a crashed predecessor. Raises SandboxFailed if this host cannot contain
        sessions."""
        raise NotImplementedError

    @required
    async def close(self) -> None:
        """End every session. When this returns, none of their processes is left."""
        raise NotImplementedError

    @required_attribute
    def num_queued(self) -> int:
        """Number of sessions that wait for their start."""
        raise NotImplementedError

    @required
    def pool_counts(self) -> PoolCounts:
        """Return the counters of ready sessions; all 0 if the engine has none."""
        raise NotImplementedError

    @required
    def limits(self, profile: str) -> Limits:
        """Return the limits of a profile, which are also the maximum for its sessions. Raises UnknownProfile."""
        raise NotImplementedError

    @required
    async def open(
        self,
        session_id: str,
        profile: str,
        limits: Limits,
        snapshot: AsyncIterator[bytes] | None = None,
        *,
        tenant: str = "",
    ) -> None:
        """Open a fresh session, restored from a snapshot of the same profile if one is given. Waiting starts are served
        round-robin by tenant. Egress counts against the rate of the tenant.

        Raises SandboxFailed if the jail cannot be created, Overloaded without a free slot, InvalidInput if the snapshot
        does not load, and the errors of `snapshot`. After an error no session is left.
        """
        raise NotImplementedError

    @required
    async def snapshot(self, session_id: str, bytes_max: int, save: SavePiece) -> tuple[str, ...]:
        """Pass the session's files and Python state to `save` as opaque bytes, at most `bytes_max`. The session
        continues.

        Returns the names that could not be saved. Raises SnapshotTooLarge, InvalidInput, UnknownSession, SandboxFailed,
        and the errors of `save`, which end the session.
        """
        raise NotImplementedError

    @required
    async def run(
        self, session_id: str, program: Program, wall_s: float, on_output: OnOutput | None = None
    ) -> RunResult:
        """Execute source text. `on_output` gets the retained output while it is printed. Raises SandboxFailed if the
        jail was lost, UnknownSession, and InvalidInput for a language that this host lacks."""
        raise NotImplementedError

    @required
    async def call(self, session_id: str, function: str, arguments: Sequence[str], wall_s: float) -> RunResult:
        """Call a function that the profile or earlier code defined. Also raises InvalidInput if it does not exist."""
        raise NotImplementedError

    @required
    async def call_all(self, session_id: str, calls: Sequence[FunctionCall], slice_s: float) -> CallsDone:
        """Call stateless functions one after another: at least the first, and no further one after `slice_s` seconds,
        after a call that reached a limit or after one that left state. Raises the errors of `run`."""
        raise NotImplementedError

    @required
    async def put_files(self, session_id: str, files: Mapping[str, bytes]) -> None:
        """Write files by relative path. Raises InvalidInput if the session rejects them (disk full, not a directory,
        ...)."""
        raise NotImplementedError

    @required
    async def get_files(self, session_id: str, paths: Sequence[str], bytes_max: int) -> dict[str, bytes]:
        """Read files. Raises InvalidInput for a missing file or more than `bytes_max` bytes in total."""
        raise NotImplementedError

    @required
    async def end(self, session_id: str) -> None:
        """End a session and all its processes; ignore unknown ids. When this returns, none of its processes is left."""
        raise NotImplementedError


ENGINES = Registry(
    "sandbox engine",
    {
        "jail": "rollmesh.services.sandbox.engines.jail_engine:JailEngine",
        "landlock": "rollmesh.services.sandbox.engines.jail_engine:JailEngine",
        "none": "rollmesh.services.sandbox.engines.jail_engine:JailEngine",
        "fake": "rollmesh.testing.fake_sandbox:FakeSandboxEngine",
    },
    SandboxEngine,
)
