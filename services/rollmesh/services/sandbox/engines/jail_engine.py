"""The engine of all drivers: sessions are forked from warm, contained zygotes, one zygote per profile.

    open   a ready session (`pools`); or slot -> zygote of the profile (started if needed) -> fork -> contained -> "ready"
    run    request on the session's own socket, without the zygote
    end    kill through the zygote -> the kernel, or the session's reaper, has reaped all processes -> slot free

When a zygote exits, its sessions end with it. Each is then an infrastructure failure, and the next `open` starts
another zygote.
"""  # noqa: E501, W505

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.sandbox_runtime import cgroups, mechanisms, stateless
from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.sandbox_runtime.program import PYTHON, Program
from rollmesh.services.sandbox import capability_probe
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.egress.ports import Ports
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
from rollmesh.services.sandbox.engines.cleanup import StateDir
from rollmesh.services.sandbox.engines.exit_cause import killed_externally
from rollmesh.services.sandbox.engines.forks import Forks, LiveSession
from rollmesh.services.sandbox.engines.jail_session import ProtocolBroken, SessionGone, SessionReply
from rollmesh.services.sandbox.engines.pools import Pools
from rollmesh.services.sandbox.engines.private_folders import PrivateFolders
from rollmesh.services.sandbox.engines.results import exited, explain, killed, to_result
from rollmesh.services.sandbox.engines.slots import SessionSlots
from rollmesh.services.sandbox.engines.uid_ranges import UidRange, claim_uids
from rollmesh.services.sandbox.engines.zygote_process import SessionExit
from rollmesh.services.sandbox.engines.zygotes import Zygotes
from rollmesh.services.sandbox.repository_images import RepositoryImages
from rollmesh.services.sandbox.starts import Starts
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.ids import IdSource
from rollmesh.shared.errors import (
    AlreadyExists,
    InvalidInput,
    MeshError,
    SandboxFailed,
    SessionNotSaved,
    UnknownProfile,
    UnknownSession,
)

_log = logging.getLogger(__name__)

_REPORT_S = 5.0
"""Seconds in which a zygote reports the end of a session whose socket has ended. A session that still runs after that
has only closed its socket."""


class JailEngine(SandboxEngine):
    """The default engine; implements `SandboxEngine`. `state_dir` belongs to this engine alone and persists over
    restarts."""

    def __init__(self, config: SandboxConfig, *, state_dir: Path, ids: IdSource, clock: Clock | None = None) -> None:
        if config.engine.name not in mechanisms.DRIVERS:  # a user's subclass, which is isolated like the jail
            config = msgspec.structs.replace(config, engine=Extension("jail"))
        self._config = config
        self._state = StateDir(state_dir)
        self._images = RepositoryImages(state_dir / "repositories")
        self._name = ids.new()
        self._folders: PrivateFolders | None = None
        self._uids = UidRange(config.uid_base, [])
        self._zygotes = Zygotes(config, self._state)
        self._forks = Forks(config)
        self._starts = Starts(
            inflight_max=config.starts_inflight_max,
            queued_max=config.starts_queued_max,
            retry_after_s=config.retry_after_s,
            clock=clock or SystemClock(),
        )
        self._pools = Pools(config, self._forks, self._zygotes, self._starts, clock or SystemClock())
        self._live: dict[str, LiveSession] = {}
        self._ports = Ports(config.egress, state_dir / "egress")

    async def start(self) -> None:
        plan = self._zygotes.plan = await asyncio.to_thread(capability_probe.plan, self._config)
        hierarchy = cgroups.detect_here() if self._config.cgroups else None
        await asyncio.to_thread(self._state.acquire)
        cleared = await asyncio.to_thread(self._state.clean_up, hierarchy)
        if cleared.num_processes or cleared.num_groups:
            _log.warning("cleaned up after a previous process: %s", cleared)
        self._state.record_groups(self._name)
        await self._ports.start()
        config = self._config
        if mechanisms.MOUNT_NAMESPACE not in plan.mechanisms:
            self._folders = await asyncio.to_thread(PrivateFolders, config.sessions_dir, self._state, self._name)
        if not config.uid_base and os.geteuid() == 0:
            self._uids = await asyncio.to_thread(claim_uids, config.sessions_max * (2 if self._folders else 1))
        self._forks.slots = SessionSlots(
            config.sessions_max, self._uids.base, hierarchy, self._name, config.retry_after_s, self._folders
        )
        for profile in config.warm:
            await self._zygotes.get(profile)
        self._pools.start()

    async def close(self) -> None:
        await self._pools.close()
        await asyncio.gather(*(self.end(session_id) for session_id in list(self._live)))
        await self._zygotes.close()
        if self._forks.started:
            self._forks.slots.remove_groups()
            self._state.forget_groups(self._name)
        if self._folders is not None:
            await asyncio.to_thread(self._folders.close)
        self._ports.stop()
        self._uids.release()
        self._state.release()

    @property
    def num_queued(self) -> int:
        return self._starts.num_queued

    def pool_counts(self) -> PoolCounts:
        return self._pools.counts()

    def limits(self, profile: str) -> Limits:
        if profile not in self._config.profiles:
            known = ", ".join(self._config.profiles)
            raise UnknownProfile(f"sandbox profile {profile!r} is not configured; known: {known}", profile=profile)
        return self._config.profiles[profile].resolved_limits()

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
        if session_id in self._live:
            raise AlreadyExists(f"session {session_id!r} is live or still ending; choose a new id", session=session_id)
        repository = self._config.profiles[profile].repository
        if snapshot is None and repository is not None:
            snapshot = await self._images.image(repository, limits.disk_bytes)
        live = await self._pools.take(profile, limits)
        if live is not None:
            self._adopt(session_id, live)
        else:
            async with self._starts.permit(tenant):
                live = await self._make(session_id, profile, limits, tenant)
        self._pools.refill()
        if snapshot is not None:
            await self._restore(session_id, live, snapshot)

    async def run(
        self, session_id: str, program: Program, wall_s: float, on_output: OnOutput | None = None
    ) -> RunResult:
        live = self._find(session_id)
        message = {"verb": "run", "files_bytes_max": self._config.files_bytes_max, "stream": on_output is not None}
        return await self._execute(session_id, live, message | program.as_message(), wall_s, on_output)

    async def call(self, session_id: str, function: str, arguments: Sequence[str], wall_s: float) -> RunResult:
        live = self._find(session_id)
        message = {"verb": "call", "function": function, "arguments": list(arguments)}
        return await self._execute(session_id, live, message, wall_s)

    async def call_all(self, session_id: str, calls: Sequence[FunctionCall], slice_s: float) -> CallsDone:
        live = self._find(session_id)
        rows = [(call.function, list(call.arguments), call.wall_s) for call in calls]
        message = {"verb": stateless.VERB, "calls": rows, "slice_s": slice_s}
        longest_s = slice_s + max(call.wall_s for call in calls)
        reply = await self._reply_or_end(
            session_id, live, live.session.request(message, longest_s + self._config.grace_s)
        )
        if isinstance(reply, RunResult):
            return CallsDone(end=reply)
        results = [
            InvalidInput(one.refused) if one.refused else to_result(one, live.killed_for_memory)
            for one in reply.replies
        ]
        if any(isinstance(result, RunResult) and not result.session_alive for result in results):
            await self.end(session_id)
        return CallsDone(results=results, changed=reply.changed)

    async def put_files(self, session_id: str, files: Mapping[str, bytes]) -> None:
        content = {path: base64.b64encode(data).decode() for path, data in files.items()}
        await self._transfer(session_id, {"verb": "put", "files": content})

    async def get_files(self, session_id: str, paths: Sequence[str], bytes_max: int) -> dict[str, bytes]:
        reply = await self._transfer(session_id, {"verb": "get", "paths": list(paths), "bytes_max": bytes_max})
        try:
            return reply.decoded_files()
        except ProtocolBroken as error:
            await self.end(session_id)
            raise InvalidInput(f"the session sent an invalid reply and was ended: {error}") from error

    async def snapshot(self, session_id: str, bytes_max: int, save: SavePiece) -> tuple[str, ...]:
        live = self._find(session_id)
        saving = live.session.save(bytes_max, save, live.limits.call_s + self._config.grace_s)
        try:
            reply = await self._handled(session_id, live, saving)
        except UnknownSession as error:
            if "ended" not in error.metadata:
                raise
            raise SessionNotSaved(
                f"the session ended while it was saved: {error.message}", session=session_id, ended="by itself"
            ) from error
        if reply.too_large:
            raise SnapshotTooLarge
        if reply.refused:
            raise SessionNotSaved(f"cannot save the session: {reply.refused}", session=session_id)
        return tuple(reply.lost)

    async def end(self, session_id: str) -> None:
        live = self._live.get(session_id)
        if live is None:
            return
        self._begin_end(session_id, live)
        await self._forks.gone(live)
        self._pools.refill()

    def _begin_end(self, session_id: str, live: LiveSession) -> None:
        if live.ended.done() and self._live.get(session_id) is live:
            del self._live[session_id]  # it ended by itself, and its user knows that now
        live.kill()

    # Create sessions ----------------------------------------------------------------------------------------------

    async def _make(self, session_id: str, profile: str, limits: Limits, tenant: str) -> LiveSession:
        slots = self._forks.slots
        slot = await self._pools.acquire_slot()
        try:
            zygote = await self._zygotes.get(profile)
            with self._ports.opening(session_id, self._config.profiles[profile].egress, tenant) as egress_fds:
                live = self._forks.fork(zygote, slot, limits, egress_fds)
        except BaseException:
            slots.release(slot)
            raise
        self._adopt(session_id, live)
        try:
            await self._forks.ready(live, session_id)
        except BaseException:
            self._begin_end(session_id, live)
            raise
        return live

    def _adopt(self, session_id: str, live: LiveSession) -> None:
        """Register a session under its id until it ends. A session that ends by itself stays registered, so that its
        user gets the reason."""
        self._live[session_id] = live

        def forget(_: asyncio.Future[SessionExit]) -> None:
            self._ports.close(session_id)
            if live.closing and self._live.get(session_id) is live:  # its user may already know the end
                del self._live[session_id]

        live.ended.add_done_callback(forget)

    # Use sessions -------------------------------------------------------------------------------------------------

    def _find(self, session_id: str) -> LiveSession:
        live = self._live.get(session_id)
        if live is None or live.closing:
            raise UnknownSession(f"no session {session_id!r} here: it was closed, expired or lost; open a new one")
        return live

    async def _execute(
        self,
        session_id: str,
        live: LiveSession,
        message: dict[str, Any],
        wall_s: float,
        on_output: OnOutput | None = None,
    ) -> RunResult:
        message["wall_s"] = wall_s
        # A rejection is the caller's mistake and never counts against the program. In Python the program could forge
        # one.
        plain = message["verb"] == "run" and message["language"] == PYTHON
        always_runs = plain and not (message["stdin"] or message["arguments"])
        exchange = live.session.request(message, wall_s + self._config.grace_s, on_output)
        reply = await self._reply_or_end(session_id, live, exchange, refusable=not always_runs)
        if isinstance(reply, RunResult):
            return reply
        if reply.refused:
            raise InvalidInput(reply.refused, session=session_id)
        result = to_result(reply, live.killed_for_memory)
        if not result.session_alive:
            await self.end(session_id)
        return result

    async def _reply_or_end(
        self,
        session_id: str,
        live: LiveSession,
        exchange: Coroutine[Any, Any, SessionReply],
        *,
        refusable: bool = True,
    ) -> SessionReply | RunResult:
        """Return the reply to a request that runs foreign code, or how the session ended instead. Raises the errors of
        `_ended_by_itself`."""
        began_s = time.monotonic()
        try:
            reply = await exchange
            if reply.refused and not refusable:
                raise ProtocolBroken("the session rejected a program that every session can run")
            return reply
        except asyncio.CancelledError:
            self._begin_end(session_id, live)
            raise
        except TimeoutError:
            await self._ended_by_itself(session_id, live)
            return killed(RunOutcome.TIME, time.monotonic() - began_s)
        except SessionGone:
            ended = await self._ended_by_itself(session_id, live, gone=True)
            return explain(ended, live.limits)
        except ProtocolBroken as error:
            await self._ended_by_itself(session_id, live)
            return exited(f"the session's protocol was broken: {error}")

    async def _transfer(self, session_id: str, message: dict[str, Any]) -> SessionReply:
        live = self._find(session_id)
        request = live.session.request(message, live.limits.call_s + self._config.grace_s)
        reply = await self._handled(session_id, live, request)
        if reply.refused:
            raise InvalidInput(reply.refused, session=session_id)
        return reply

    async def _restore(self, session_id: str, live: LiveSession, snapshot: AsyncIterator[bytes]) -> None:
        """Restore a snapshot. This needs no start permit, because foreign code may run while values load, for the time
        of a whole call."""
        restoring = live.session.restore(snapshot, live.limits.call_s + self._config.grace_s)
        try:
            reply = await self._handled(session_id, live, restoring)
            refused = reply.refused
        except UnknownSession as error:
            refused = error.message
        except MeshError:
            await self.end(session_id)
            raise
        if refused:
            await self.end(session_id)
            raise SessionNotSaved(f"the snapshot does not load: {refused}", session=session_id)

    async def _handled(
        self, session_id: str, live: LiveSession, exchange: Coroutine[Any, Any, SessionReply]
    ) -> SessionReply:
        """Return the reply to a request that runs no program. A session that fails or is left in the middle is
        ended."""
        try:
            return await exchange
        except (TimeoutError, SessionGone, ProtocolBroken) as error:
            await self._ended_by_itself(session_id, live, gone=isinstance(error, SessionGone))
            raise UnknownSession(
                f"session {session_id!r} ended during a file transfer: {error}", session=session_id, ended="by itself"
            ) from error
        except BaseException:
            self._begin_end(session_id, live)
            raise

    async def _ended_by_itself(self, session_id: str, live: LiveSession, *, gone: bool = False) -> SessionExit:
        """Ensure that a session which failed a request is gone. Raises UnknownSession if another call was ending it,
        and SandboxFailed if its program did not cause the end. `gone` means that its socket has ended, so the session
        is exiting, unless it only closed the socket."""
        closing = live.closing
        if gone and not closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPORT_S):
                    await asyncio.shield(live.ended)
        unasked = live.ended.done()
        self._begin_end(session_id, live)
        ended = await self._forks.gone(live)
        if closing:
            raise UnknownSession(f"session {session_id!r} was closed during a command")
        if ended.lost:
            raise SandboxFailed("the session was lost with its zygote", session=session_id)
        if unasked and killed_externally(ended, live.limits):
            raise SandboxFailed("another process killed the session; the host may be out of memory", session=session_id)
        return ended
