"""Sessions as processes: forked from a zygote into a place, awaited until they are contained, and gone when the kernel has reaped them.

Who uses a session, and under what name, is not known here: one that was made ahead is like one that was made when asked for. The zygote
knows it by a number.
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
    """A session from its fork until nothing of it is left."""

    key: str
    """The zygote's name for it."""
    session: JailSession
    zygote: ZygoteProcess
    slot: SessionSlot
    limits: Limits
    ended: asyncio.Future[SessionExit]
    """Done when nothing of the session is left and its place is free."""
    memory_kills: MemoryKills
    out_of_memory: bool = False
    """Whether the kernel has killed a process of the session for the session's own memory limit, as far as was asked."""
    closing: bool = False
    """Whether we have begun to end it."""

    def kill(self) -> None:
        """Have it killed; `ended` tells when nothing of it is left."""
        self.closing = True
        self.zygote.kill(self.key)

    def killed_for_memory(self) -> bool:
        """Return whether the kernel has killed for memory since this was last asked. `out_of_memory` remembers every such kill: a forged
        reply can make the service ask at a moment that the program chooses."""
        new = self.memory_kills.any_new()
        self.out_of_memory = self.out_of_memory or new
        return new

    @property
    def quiet(self) -> bool:
        """Whether it lives and has said nothing since it was ready, as far as can be told without waiting."""
        return not self.closing and not self.ended.done() and self.session.quiet


class Forks:
    """Makes sessions. `slots` is set before the first."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._keys = itertools.count()
        self._slots: SessionSlots | None = None
        self._memory_kills: dict[int, MemoryKills] = {}
        """By place, whose sessions come one after another."""

    @property
    def started(self) -> bool:
        """Whether there are places."""
        return self._slots is not None

    @property
    def slots(self) -> SessionSlots:
        """Where sessions are."""
        assert self._slots is not None, "start() comes first"
        return self._slots

    @slots.setter
    def slots(self, slots: SessionSlots) -> None:
        self._slots = slots

    def fork(
        self, zygote: ZygoteProcess, slot: SessionSlot, limits: Limits, egress_fds: tuple[int, ...] = ()
    ) -> LiveSession:
        """Begin a session in a place, which is given back when it has ended. Raises SandboxFailed; the place is the caller's then."""
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise SandboxFailed(f"cannot make a session's socket: {error}") from error
        ours.setblocking(False)
        entry_fds: list[int] = []
        key = str(next(self._keys))
        try:
            if slot.group is not None:
                slot.group.limit(limits)
                entry_fds = slot.group.entry_fds()
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
        """Nothing of the session is left: the one place where a place is given back. Only then is `live.ended` done, so that whoever
        reads it finds the whole account."""
        live.killed_for_memory()
        live.session.close()
        self.slots.release(live.slot)
        live.ended.set_result(replace(ended, out_of_memory=live.out_of_memory))

    async def ready(self, live: LiveSession, session_id: str = "") -> None:
        """Wait until it is contained. Raises SandboxFailed when it has ended instead; ends it if cancelled.

        Before it is ready a session runs no foreign code: whatever goes wrong is ours.
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
        raise SandboxFailed(f"the jail could not be made: {ended.refused or reason}", session=session_id)

    async def gone(self, live: LiveSession) -> SessionExit:
        """Wait for the kernel to have reaped everything; a zygote that does not report it is ended itself."""
        waiting: Awaitable[SessionExit] = asyncio.shield(live.ended)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.start_timeout_s):
                return await waiting
        await live.zygote.close()
        return await live.ended
