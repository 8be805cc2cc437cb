"""Sessions as leases: owner, time to live, order of commands, counters. Works over any engine.

A session exists from `open` to exactly one of five ends: CLOSED by its user, EXITED by its program, EXPIRED with its
lease, LOST with its jail (an infrastructure failure), or REJECTED if it never opened. At every moment created = live +
the sum of ends.

Commands of one session run one after another, in the order of their calls: each takes the session's lock, and asyncio
locks are fair. Use renews a lease, and a lease cannot expire during use. Every use is bounded by the session's limits.
If the holder of a lease (the stream that used it last) is gone, the lease expires after `orphan_s` unless another
holder uses it before.

A lease of a shared session exists only for `StatelessCalls`. To all other callers its id is unknown, so that no code of
a model can reach it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import PurePosixPath

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engine import CallsDone, FunctionCall, OnOutput, RunResult, SandboxEngine
from rollmesh.services.sandbox.tenants import Tenants
from rollmesh.shared.clock import Clock
from rollmesh.shared.errors import (
    AlreadyExists,
    Draining,
    Overloaded,
    SandboxFailed,
    SessionNotSaved,
    UnknownSession,
    field_error,
)

_DRAIN_POLL_S = 0.1
_PATHS_MAX = 4096
"""Maximum number of files per command. Their names are checked on the event loop, which all sessions share."""


class SessionEnd(Enum):
    """How a session ended."""

    CLOSED = "closed"
    EXITED = "exited"
    EXPIRED = "expired"
    LOST = "lost"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counters of sessions: created = live + sum(ended.values())."""

    created: int
    live: int
    ended: Mapping[SessionEnd, int]


@dataclass(slots=True, eq=False)
class Holder:
    """The stream that uses a lease."""

    alive: bool = True


@dataclass(slots=True, kw_only=True)
class SessionLease:
    """Lease of one live session."""

    profile: str
    tenant: str
    owner: str
    ttl_s: float
    expires_s: float
    limits: Limits
    holder: Holder
    shared: bool = False
    in_use: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """The live sessions of a node."""

    def __init__(self, engine: SandboxEngine, config: SandboxConfig, clock: Clock) -> None:
        self._engine = engine
        self._config = config
        self._clock = clock
        self._leases: dict[str, SessionLease] = {}
        self.tenants = Tenants(config.tenants, config.retry_after_s)
        self._draining = False
        self._created = 0
        self._ends: Counter[SessionEnd] = Counter()

    def counts(self) -> Counts:
        """Return the counters since the start."""
        return Counts(created=self._created, live=len(self._leases), ended={end: self._ends[end] for end in SessionEnd})

    def owners(self) -> dict[str, str]:
        """Return the owner of each live session."""
        return {session_id: lease.owner for session_id, lease in self._leases.items()}

    async def drain(self) -> None:
        """Reject new sessions and wait until the last session has ended, at most `drain_s`."""
        self._draining = True
        end_s = self._clock.monotonic_s() + self._config.drain_s
        while self._leases and self._clock.monotonic_s() < end_s:
            await self._clock.sleep(_DRAIN_POLL_S)

    async def open(
        self,
        session_id: str,
        *,
        profile: str,
        limits: Mapping[str, float],
        ttl_s: float,
        owner: str,
        tenant: str = "",
        holder: Holder | None = None,
        snapshot: AsyncIterator[bytes] | None = None,
        shared: bool = False,
    ) -> None:
        """Open a session under a lease, restored from a snapshot if one is given. 0 in `limits` and `ttl_s` means the
        default of the profile and the node.

        Raises InvalidInput, AlreadyExists, UnknownProfile, Overloaded, Draining, SandboxFailed.
        """
        lease = self._admit(session_id, profile, limits, ttl_s, owner, tenant, holder or Holder())
        lease.shared = shared
        try:
            with self.tenants.starting(tenant):
                async with self.using(session_id, shared=shared):
                    await self._engine.open(session_id, profile, lease.limits, snapshot, tenant=tenant)
        except BaseException:
            self._finish(session_id, lease, SessionEnd.REJECTED)
            raise

    async def run(
        self, session_id: str, program: Program, wall_s: float, on_output: OnOutput | None = None
    ) -> RunResult:
        """Execute source text. `wall_s` 0 means the session's limit. Raises the errors of the engine, and InvalidInput
        for a path outside the session's directory."""
        _require_inside("return_paths", program.return_paths)
        async with self._commanding(session_id) as lease:
            result = await self._engine.run(session_id, program, checked_wall_s(lease.limits, wall_s), on_output)
            return self._recorded(session_id, lease, result)

    async def call(self, session_id: str, function: str, arguments: Sequence[str], wall_s: float) -> RunResult:
        """Call a function of the session. Raises the errors of the engine."""
        async with self._commanding(session_id) as lease:
            result = await self._engine.call(session_id, function, arguments, checked_wall_s(lease.limits, wall_s))
            return self._recorded(session_id, lease, result)

    async def call_all(self, session_id: str, calls: Sequence[FunctionCall], slice_s: float) -> CallsDone:
        """Call stateless functions of a shared session. Raises the errors of the engine."""
        async with self.using(session_id, shared=True) as lease:
            done = await self._engine.call_all(session_id, calls, slice_s)
            if done.end is not None:
                self._finish(session_id, lease, SessionEnd.EXITED)
            return done

    async def put_files(self, session_id: str, files: Mapping[str, bytes]) -> None:
        """Write files. Raises the errors of the engine, and InvalidInput for a path outside the session's directory."""
        _require_inside("files", files)
        async with self._commanding(session_id):
            await self._engine.put_files(session_id, files)

    async def get_files(self, session_id: str, paths: Sequence[str]) -> dict[str, bytes]:
        """Read files. Raises the errors of the engine, and InvalidInput for a path outside the session's directory."""
        _require_inside("paths", paths)
        async with self._commanding(session_id):
            return await self._engine.get_files(session_id, paths, self._config.files_bytes_max)

    async def close(self, session_id: str, *, shared: bool = False) -> None:
        """End a session after its pending commands. Closing an unknown session succeeds."""
        with suppress(UnknownSession):
            async with self.using(session_id, shared=shared) as lease:
                self._finish(session_id, lease, SessionEnd.CLOSED)
                await self._engine.end(session_id)

    def renew(self, session_id: str) -> None:
        """Extend the lease to its full time to live from now. Raises UnknownSession."""
        lease = self._find(session_id, shared=False)
        lease.expires_s = self._expiry_s(lease)

    def set_holder(self, session_id: str, holder: Holder) -> None:
        """Record the stream that uses the session; ignore unknown sessions."""
        if (lease := self._leases.get(session_id)) is not None and not lease.shared:
            lease.holder = holder

    def release_holder(self, holder: Holder) -> None:
        """Record that the holder is gone. Its sessions expire soon unless another holder uses them."""
        holder.alive = False
        for lease in self._leases.values():
            if lease.holder is holder:
                lease.expires_s = min(lease.expires_s, self._expiry_s(lease))

    async def sweep(self) -> int:
        """End the sessions whose lease expired unused. Return their number."""
        now_s = self._clock.monotonic_s()
        expired = [(key, lease) for key, lease in self._leases.items() if not lease.in_use and lease.expires_s <= now_s]
        for session_id, lease in expired:
            self._finish(session_id, lease, SessionEnd.EXPIRED)
        await asyncio.gather(*(self._engine.end(session_id) for session_id, _ in expired))
        return len(expired)

    async def reap(self) -> None:
        """Sweep until cancelled. No lease exceeds its time by more than `reap_every_s`."""
        while True:
            await self._clock.sleep(self._config.reap_every_s)
            await self.sweep()

    def _admit(
        self,
        session_id: str,
        profile: str,
        limits: Mapping[str, float],
        ttl_s: float,
        owner: str,
        tenant: str,
        holder: Holder,
    ) -> SessionLease:
        if not session_id:
            raise field_error("session_id", "not be empty", session_id, "use the episode's id and attempt")
        if session_id in self._leases:
            raise AlreadyExists(f"session {session_id!r} is already open, by {self._leases[session_id].owner!r}")
        if not 0 <= ttl_s <= self._config.ttl_s_max:
            raise field_error("ttl_s", f"be in [0, {self._config.ttl_s_max:g}]", ttl_s)
        narrowed = _narrow(self._engine.limits(profile), limits)
        if self._draining:
            raise Draining("this sandbox node is draining and accepts no new sessions; use another node")
        if len(self._leases) >= self._config.sessions_max:
            raise Overloaded(
                f"all {self._config.sessions_max} slots of this sandbox node are in use; wait or use another node",
                retry_after_s=self._config.retry_after_s,
            )
        self.tenants.begin_session(tenant)
        ttl_s = ttl_s or self._config.ttl_s
        lease = SessionLease(
            profile=profile,
            tenant=tenant,
            owner=owner,
            ttl_s=ttl_s,
            expires_s=self._clock.monotonic_s() + ttl_s,
            limits=narrowed,
            holder=holder,
        )
        self._leases[session_id] = lease
        self._created += 1
        return lease

    @asynccontextmanager
    async def _commanding(self, session_id: str) -> AsyncIterator[SessionLease]:
        """Use a session and count the command against the quota of its tenant."""
        lease = self._leases.get(session_id)
        with self.tenants.commanding(lease.tenant) if lease is not None else nullcontext():
            async with self.using(session_id) as used:
                yield used

    @asynccontextmanager
    async def using(self, session_id: str, *, shared: bool = False) -> AsyncIterator[SessionLease]:
        """Lock a session for one command and record its end if the command shows that it is gone."""
        lease = self._find(session_id, shared=shared)
        lease.in_use += 1
        try:
            async with lease.lock:
                if self._leases.get(session_id) is not lease:
                    raise _unknown(session_id)
                with self._recording_failures(session_id, lease):
                    yield lease
        finally:
            lease.in_use -= 1
            lease.expires_s = self._expiry_s(lease)

    @contextmanager
    def replacing(self, session_id: str) -> Iterator[None]:
        """Use inside `using` around replacing a session's jail. After any error the session is lost."""
        try:
            yield
        except BaseException:
            self._finish(session_id, self._leases[session_id], SessionEnd.LOST)
            raise

    def is_live(self, session_id: str) -> bool:
        """Return whether the session has a lease."""
        return session_id in self._leases

    def profile_limits(self, profile: str) -> Limits:
        """Return the limits of a profile. Raises UnknownProfile."""
        return self._engine.limits(profile)

    def _find(self, session_id: str, *, shared: bool) -> SessionLease:
        lease = self._leases.get(session_id)
        if lease is None or lease.shared is not shared:
            raise _unknown(session_id)
        return lease

    def _expiry_s(self, lease: SessionLease) -> float:
        ttl_s = lease.ttl_s if lease.holder.alive else min(lease.ttl_s, self._config.orphan_s)
        return self._clock.monotonic_s() + ttl_s

    @contextmanager
    def _recording_failures(self, session_id: str, lease: SessionLease) -> Iterator[None]:
        try:
            yield
        except SandboxFailed:
            self._finish(session_id, lease, SessionEnd.LOST)
            raise
        except UnknownSession:
            self._finish(session_id, lease, SessionEnd.EXITED)
            raise
        except SessionNotSaved as error:
            if "ended" in error.metadata:
                self._finish(session_id, lease, SessionEnd.EXITED)
            raise
        except asyncio.CancelledError:
            # The engine ends a cancelled session, because its state is unknown.
            self._finish(session_id, lease, SessionEnd.CLOSED)
            raise

    def _recorded(self, session_id: str, lease: SessionLease, result: RunResult) -> RunResult:
        if not result.session_alive:
            self._finish(session_id, lease, SessionEnd.EXITED)
        return result

    def _finish(self, session_id: str, lease: SessionLease, end: SessionEnd) -> None:
        """End a lease. The first recorded end counts. No other code ends leases."""
        if self._leases.get(session_id) is lease:
            del self._leases[session_id]
            self.tenants.end_session(lease.tenant)
            self._ends[end] += 1


def _unknown(session_id: str) -> UnknownSession:
    return UnknownSession(f"no session {session_id!r} here: it was closed, expired or lost; open a new one")


def checked_wall_s(limits: Limits, wall_s: float) -> float:
    """Return the time limit of a command, by default that of the session. Raises InvalidInput."""
    if not 0 <= wall_s <= limits.call_s:
        raise field_error("wall_s", f"be in [0, {limits.call_s:g}], the session's limit", wall_s)
    return wall_s or limits.call_s


def _narrow(profile: Limits, asked: Mapping[str, float]) -> Limits:
    """Return the profile's limits, lowered where requested; 0 means the profile's limit."""
    for name, value in asked.items():
        most = getattr(profile, name)
        if not 0 <= value <= most:
            raise field_error(f"limits.{name}", f"be in [0, {most}], the profile's limit", value)
    return replace(profile, **{name: type(getattr(profile, name))(value) for name, value in asked.items() if value})


def _require_inside(name: str, paths: Collection[str]) -> None:
    """Raise InvalidInput that names the field for the first path outside the session's directory. This is only an early
    error; the guarantee is that files are handled inside the jail."""
    if len(paths) > _PATHS_MAX:
        raise field_error(name, f"have at most {_PATHS_MAX} entries", len(paths), "split the command")
    for path in paths:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            raise field_error(name, "have relative paths without '..'", path)
