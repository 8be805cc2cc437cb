"""A sandbox node put together: engine, leases, reaper and servicer, as one async context.

    async with SandboxNode(config, state_dir=..., clock=..., ids=...) as node:
        server.add(sandbox_pb2_grpc.add_SandboxServiceServicer_to_server, node.servicer)

Leaving it gives commands in progress `stop_s`, then ends every session; nothing of them is left.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engine import SandboxEngine
from rollmesh.services.sandbox.engines.fake_engine import FakeEngine
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.services.sandbox.servicer import SandboxServicer
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.shared.clock import Clock
from rollmesh.shared.ids import IdSource


class SandboxNode:
    """One node. `state_dir` is its own and kept over restarts: leftovers of an earlier life are found through it."""

    def __init__(self, config: SandboxConfig, *, state_dir: Path, clock: Clock, ids: IdSource) -> None:
        self._config = config
        self._engine = make_engine(config, state_dir=state_dir, ids=ids)
        self.sessions = Sessions(self._engine, config, clock)
        self.servicer = SandboxServicer(self.sessions, config, clock=clock, ids=ids)
        self._reaper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._engine.start()
        except BaseException:
            await self._engine.close()
            raise
        self._reaper = asyncio.create_task(self.sessions.reap(), name="sandbox reaper")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._reaper is not None
        self._reaper.cancel()
        try:
            await self.servicer.drain(self._config.stop_s)
            await asyncio.wait({self._reaper})
            if not self._reaper.cancelled():
                self._reaper.result()
        finally:
            await self._engine.close()


def make_engine(config: SandboxConfig, *, state_dir: Path, ids: IdSource) -> SandboxEngine:
    """The engine that `config.engine` names."""
    if config.engine == "fake":
        return FakeEngine(config)
    return JailEngine(config, state_dir=state_dir, ids=ids)
