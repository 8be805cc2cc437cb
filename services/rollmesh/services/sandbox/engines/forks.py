"""Sessions as processes: fork them from a zygote into a slot, wait until they are contained, and wait until the kernel
has reaped them.

This module does not know the user and the name of a session, so ready and requested sessions are alike. The zygote
identifies a session by a number.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Awaitable
from dataclasses import dataclass, replace

from rollmesh.sandbox_runtime.limits import Limits
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engines.exit_cause import MemoryKills
from rollmesh.services.sandbox.engines.jail_session import JailSession, ProtocolBroken, SessionGone
from rollmesh.services.sandbox.engines.slots import SessionSlot, SessionSlots
from rollmesh.services.sandbox.engines.zygote_process import SessionExit, ZygoteProcess
from rollmesh.shared.errors import SandboxFailed


@dataclass(slots=True, eq=False)
class LiveSession:
    """A session from its fork until all its processes are gone."""

    key: str
    """Id of the session in the zygote."""
    session: JailSession
    zygote: ZygoteProcess
    slot: SessionSlot
    limits: Limits
    ended: asyncio.Future[SessionExit]
    """Done when all processes of the session are gone and its slot is free."""
    memory_kills: MemoryKills
    out_of_memory: bool = False
    """Whether a check has found that the kernel killed a process because of the memory limit of the session."""
    closing: bool = False
    """Whether the service has requested its end."""

    def kill(self) -> None:
        """Request the kill; `ended` is done when all its processes are gone."""
        self.closing = True
        self.zygote.kill(self.key)

    def killed_for_memory(self) -> bool:
        """Return whether the kernel has killed for memory since the last call. `out_of_memory` remembers every such
        kill, because a forged reply can make the service check at a moment that the program chooses."""
        new = self.memory_kills.any_new()
        self.out_of_memory = self.out_of_memory or new
        return new

    @property
    def quiet(self) -> bool:
        """Whether the session runs and has sent nothing since it was ready, as far as a non-blocking check can show."""
        return not self.closing and not self.ended.done() and self.session.quiet


class Forks:
    """Creates sessions. Set `slots` before the first one."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._keys = itertools.count()
        self._slots: SessionSlots | None = None
        self._memory_kills: dict[int, MemoryKills] = {}
        """Memory kills by slot. The sessions of a slot run one after another."""

    @property
    def started(self) -> bool:
        """Whether `slots` is set."""
        return self._slots is not None

    @property
    def slots(self) -> SessionSlots:
        """The slots of the engine."""
        assert self._slots is not None, "start() comes first"
        return self._slots

    @slots.setter
    def slots(self, slots: SessionSlots) -> None:
        self._slots = slots

    def fork(
        self, zygote: ZygoteProcess, slot: SessionSlot, limits: Limits, egress_fds: tuple[int, ...] = ()
    ) -> LiveSession:
        """Start a session in a slot, which is released when the session has ended. Raises SandboxFailed; the caller
        then still owns the slot."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise SandboxFailed(f"cannot make a session's socket: {error}") from error
        ours.setblocking(False)
        entry_fds: list[int] = []
        key = str(next(self._keys))
        try:
            if slot.group is not None:
                entry_fds = slot.group.enter(limits)
            reaped = zygote.open(key, slot, limits, (theirs.fileno(), *entry_fds), egress_fds)
        except OSError as error:
            ours.close()
            raise SandboxFailed(f"cannot set the session's cgroup: {error}") from error
        except SandboxFailed:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in entry_fds:
                os.close(fd)
        session = JailSession(ours, limits, self._config.files_bytes_max)
        kills = self._memory_kills.setdefault(slot.index, MemoryKills(slot.group))
        live = LiveSession(key, session, zygote, slot, limits, asyncio.get_running_loop().create_future(), kills)
        reaped.add_done_callback(lambda done: self._release(live, done.result()))
        return live

    def _release(self, live: LiveSession, ended: SessionExit) -> None:
        """Release the slot of a session whose processes are all gone. No other code releases slots of sessions.
        `live.ended` is set last, so that its readers see all other changes."""
        live.killed_for_memory()
        live.session.close()
        self.slots.release(live.slot)
        live.ended.set_result(replace(ended, out_of_memory=live.out_of_memory))

    async def ready(self, live: LiveSession, session_id: str = "") -> None:
        """Wait until the session is contained. Raises SandboxFailed if it has ended instead; kills it if cancelled.

        Before it is ready a session runs no foreign code, so every error is an infrastructure failure.
        """
        reason = "the session was not ready in time"
        try:
            reply = await live.session.receive(self._config.start_timeout_s)
            if reply.ready:
                return
            reason = reply.reason
        except TimeoutError:
            pass
        except (SessionGone, ProtocolBroken) as error:
            reason = str(error)
        except BaseException:
            live.kill()
            raise
        live.kill()
        ended = await self.gone(live)
        raise SandboxFailed(f"cannot create the jail: {ended.refused or reason}", session=session_id)

    async def gone(self, live: LiveSession) -> SessionExit:
        """Wait until the kernel has reaped all processes. If the zygote does not report this in time, kill the
        zygote."""
        waiting: Awaitable[SessionExit] = asyncio.shield(live.ended)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.start_timeout_s):
                return await waiting
        await live.zygote.close()
        return await live.ended
