"""The zygotes of a jail engine: one per profile, started on first use, and restarted after it exited or was ended as
idle."""

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
from rollmesh.services.sandbox.languages import declared_commands
from rollmesh.shared.errors import SandboxFailed
from rollmesh.shared.shared_tasks import SharedTasks

STARTS_MAX = 3
"""Starts for one caller. A launcher that ends as soon as it is ready would otherwise be started without limit."""
_SERVICE_FIELDS = ("limits", "egress", "library_lock", "repository", "stateless")
"""Fields of a profile that its zygote does not need."""


class Zygotes:
    """Zygotes by profile. Set `plan` before the first use."""

    def __init__(self, config: SandboxConfig, state: StateDir) -> None:
        self.plan: IsolationPlan | None = None
        self._config = config
        self._state = state
        self._languages = declared_commands(config.languages)
        self._running: dict[str, ZygoteProcess] = {}
        self._ending: set[ZygoteProcess] = set()
        self._starting: SharedTasks[str, None] = SharedTasks("the start of the zygote of profile")
        """One start per profile. It continues if its callers are cancelled, because others wait for it."""
        self._locks = {name: asyncio.Lock() for name in config.profiles}
        self._closed = False

    async def get(self, profile: str) -> ZygoteProcess:
        """Return a running zygote, started if needed. It is guaranteed to run only until the caller awaits again.

        Raises SandboxFailed, and Cancelled if `close` ends the start.
        """
        num_starts = 0
        while (zygote := self.running(profile)) is None:  # it can end before the caller resumes
            if self._closed:
                raise SandboxFailed("the sandbox engine is closed; retry elsewhere")
            if num_starts == STARTS_MAX:
                raise SandboxFailed(
                    f"the zygote of profile {profile} ended {STARTS_MAX} times as soon as it was ready; see "
                    f"{self._log(profile)}"
                )
            await self._starting.join(profile, lambda: self._replace(profile))
            num_starts += 1
        return zygote

    def running(self, profile: str) -> ZygoteProcess | None:
        """Return the current zygote if sessions can be created in it."""
        zygote = self._running.get(profile)
        return zygote if zygote is not None and zygote.alive else None

    async def end_if(self, profile: str, unwanted: Callable[[], bool]) -> None:
        """End a zygote if it has no sessions and `unwanted` returns True at a moment when no caller can be about to use
        it."""
        async with self._locks[profile]:
            zygote = self._running.get(profile)
            if zygote is not None and not zygote.num_sessions and unwanted():
                await self._end(profile)

    async def close(self) -> None:
        """End all zygotes with their sessions, and those that are starting."""
        self._closed = True
        await self._starting.close()
        self._ending.update(self._running.values())
        self._running.clear()
        await asyncio.gather(*(self._ended(zygote) for zygote in list(self._ending)))

    async def _replace(self, profile: str) -> None:
        async with self._locks[profile]:
            if profile in self._running:
                await self._end(profile)
            await self._start(profile)

    async def _start(self, profile: str) -> None:
        assert self.plan is not None, "start() comes first"
        described = msgspec.to_builtins(self._config.profiles[profile])
        for name in _SERVICE_FIELDS:
            del described[name]
        described["languages"] = msgspec.to_builtins(self._languages)
        described["pickler"] = str(Path(cloudpickle.__file__).parent)
        zygote = await ZygoteProcess.start(
            self._config.python, described, self.plan, self._log(profile), self._config.start_timeout_s
        )
        self._running[profile] = zygote
        self._state.record_launcher(zygote.pid)

    def _log(self, profile: str) -> Path:
        return self._state.path / f"zygote-{profile}.log"

    async def _end(self, profile: str) -> None:
        zygote = self._running.pop(profile)
        self._ending.add(zygote)
        await self._ended(zygote)

    async def _ended(self, zygote: ZygoteProcess) -> None:
        await zygote.close()
        self._ending.discard(zygote)
        self._state.forget_launcher(zygote.pid)
