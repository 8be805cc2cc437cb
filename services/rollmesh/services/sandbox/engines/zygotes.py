"""The zygotes of a jail engine: one per profile, started when it is first needed, or anew when it has died or was ended for want of use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import msgspec

from rollmesh.sandbox_runtime.mechanisms import IsolationPlan
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engines.cleanup import StateDir
from rollmesh.services.sandbox.engines.zygote_process import ZygoteProcess

_SERVICE_FIELDS = ("limits", "egress", "library_lock", "repository")
"""Fields of a profile that are no business of its zygote."""


class Zygotes:
    """By profile. `plan` is set before the first is wanted."""

    def __init__(self, config: SandboxConfig, state: StateDir) -> None:
        self.plan: IsolationPlan | None = None
        self._config = config
        self._state = state
        self._running: dict[str, ZygoteProcess] = {}
        self._ending: set[ZygoteProcess] = set()
        self._locks = {name: asyncio.Lock() for name in config.profiles}

    async def get(self, profile: str) -> ZygoteProcess:
        """One that lives, started if there is none. Raises SandboxFailed. It is sure to live on only until the caller waits again."""
        async with self._locks[profile]:
            if (zygote := self.running(profile)) is not None:
                return zygote
            if profile in self._running:
                await self._end(profile)
            return await self._start(profile)

    def running(self, profile: str) -> ZygoteProcess | None:
        """The present one, if sessions can be made in it."""
        zygote = self._running.get(profile)
        return zygote if zygote is not None and zygote.alive else None

    async def end_if(self, profile: str, unwanted: Callable[[], bool]) -> None:
        """End it, unless it has sessions or `unwanted` says no at the moment in which nobody can be about to use it."""
        async with self._locks[profile]:
            zygote = self._running.get(profile)
            if zygote is not None and not zygote.num_sessions and unwanted():
                await self._end(profile)

    async def close(self) -> None:
        """End them all, with their sessions."""
        self._ending.update(self._running.values())
        self._running.clear()
        await asyncio.gather(*(self._ended(zygote) for zygote in list(self._ending)))

    async def _start(self, profile: str) -> ZygoteProcess:
        assert self.plan is not None, "start() comes first"
        described = msgspec.to_builtins(self._config.profiles[profile])
        for name in _SERVICE_FIELDS:
            del described[name]
        described["pickler"] = str(Path(cloudpickle.__file__).parent)
        log = self._state.path / f"zygote-{profile}.log"
        zygote = await ZygoteProcess.start(self._config.python, described, self.plan, log, self._config.start_timeout_s)
        self._running[profile] = zygote
        self._state.record_launcher(zygote.pid)
        return zygote

    async def _end(self, profile: str) -> None:
        zygote = self._running.pop(profile)
        self._ending.add(zygote)
        await self._ended(zygote)

    async def _ended(self, zygote: ZygoteProcess) -> None:
        await zygote.close()
        self._ending.discard(zygote)
        self._state.forget_launcher(zygote.pid)
