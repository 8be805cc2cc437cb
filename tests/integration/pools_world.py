"""An engine with pools of ready sessions under a manual clock, for the tests of pools."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import PoolsConfig, SandboxConfig
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.services.sandbox.sessions import Sessions
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.domain.ids import RandomIds

from .process_tree import Process, descendants

WAIT_S = 30.0
IDLE_S = 50.0
LOOK = """
import os, resource, signal, sys, threading
limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith('RLIMIT')}
{
    'limits': limits, 'pid': os.getpid(), 'files': sorted(os.listdir('.')), 'cwd': os.getcwd(), 'room': os.statvfs('.').f_bavail,
    'names': sorted(globals()), 'threads': threading.active_count(), 'fds': sorted(os.listdir('/dev')), 'call': sys._getframe().f_code.co_filename,
    'alarm': signal.getitimer(signal.ITIMER_PROF)[1], 'environment': dict(os.environ), 'groups': os.getgroups(), 'umask': os.umask(0o22),
}
"""


class World:
    """An engine under a manual clock; ready sessions follow real opens."""

    def __init__(self, engine: JailEngine, config: SandboxConfig, clock: ManualClock) -> None:
        self.engine = engine
        self.sessions = Sessions(engine, config, clock)
        self.clock = clock

    async def open(self, session_id: str, profile: str = "python") -> None:
        await self.engine.open(session_id, profile, self.engine.limits(profile))

    async def ready(self, num: int, profile: str = "python") -> None:
        await until(lambda: self.num_ready(profile) == num)

    def num_ready(self, profile: str = "python") -> int:
        self.require_balanced()
        return self.engine.pool_counts().ready.get(profile, 0)

    def require_balanced(self) -> None:
        counts = self.engine.pool_counts()
        assert counts.made == counts.taken + counts.dropped + sum(counts.ready.values())

    async def look(self, session_id: str) -> str:
        result = await self.engine.run(session_id, Program(code=LOOK), 5.0)
        assert result.result, result.error_message
        return result.result

    async def tend(self, seconds: float = 1.5) -> None:
        """Advance the clock; the maintenance task of the pools sleeps again when this returns."""
        self.clock.advance(seconds)
        await until(lambda: self.clock.num_sleepers() == 1)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - processes have no event to wait on
            await asyncio.sleep(0.005)


@asynccontextmanager
async def world_of(tmp_path: Path, *, most: int = 4, **changes: object) -> AsyncIterator[World]:
    pools = PoolsConfig(ready_max=most, halflife_s=10.0, zygote_idle_s=IDLE_S)
    config = SandboxConfig(pools=pools, **changes)  # type: ignore[arg-type]
    clock = ManualClock()
    engine = JailEngine(config, state_dir=tmp_path, ids=RandomIds(), clock=clock)
    await engine.start()
    try:
        await until(lambda: clock.num_sleepers() == 1)
        yield World(engine, config, clock)
    finally:
        await engine.close()


def records(folder: Path) -> list[Path]:
    """Return the names of state directories."""
    return [*folder.glob("*/launcher-*"), *folder.glob("*/groups-*"), *folder.glob("*/folders-*")]


def processes() -> set[Process]:
    return set(descendants(os.getpid()))
