"""Our own contenders of `bench sandbox`: a fresh session with its first call, and a call in a live session, each with
and without gRPC.

The engine runs in the bench's process. The service runs in a separate process, as in a mesh, with one Work stream. The
session of a gRPC execution is closed, and the close confirmed, before the next one of the same worker starts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.sandbox.arm import CODE, PRINTED
from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.engine import RunOutcome, RunResult
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.services.sandbox.node import SandboxNode
from rollmesh.shared.clients.sandbox_link import WorkLink
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import sandbox_pb2 as pb

PROFILE = "python"
ACCESS = Access(token="bench")
WALL_S = 5.0
LIMIT_S = 60.0


class EngineFresh:
    """Open a session, run and end it: the jail engine without leases and gRPC."""

    def __init__(self, engine: JailEngine) -> None:
        self._engine = engine
        self._limits = engine.limits(PROFILE)
        self._numbers = itertools.count()

    async def prepare(self, num: int) -> None:
        """Do nothing."""

    async def once(self, worker: int) -> float:
        session_id = f"fresh-{next(self._numbers)}"
        begin_s = time.perf_counter()
        await self._engine.open(session_id, PROFILE, self._limits)
        result = await self._engine.run(session_id, Program(code=CODE), WALL_S)
        latency_s = time.perf_counter() - begin_s
        await self._engine.end(session_id)
        _require(result)
        return latency_s

    async def settle(self) -> None:
        """Do nothing: each session has ended."""


class EngineLive:
    """Run in a live session."""

    def __init__(self, engine: JailEngine) -> None:
        self._engine = engine
        self._num = 0

    async def prepare(self, num: int) -> None:
        self._num = num
        for worker in range(num):
            await self._engine.open(f"live-{worker}", PROFILE, self._engine.limits(PROFILE))

    async def once(self, worker: int) -> float:
        begin_s = time.perf_counter()
        _require(await self._engine.run(f"live-{worker}", Program(code=CODE), WALL_S))
        return time.perf_counter() - begin_s

    async def settle(self) -> None:
        for worker in range(self._num):
            await self._engine.end(f"live-{worker}")


class ServiceFresh:
    """Open a session, run and end it over gRPC."""

    def __init__(self, link: WorkLink) -> None:
        self._link = link
        self._numbers = itertools.count()

    async def prepare(self, num: int) -> None:
        """Do nothing."""

    async def once(self, worker: int) -> float:
        session_id = f"fresh-{next(self._numbers)}"
        begin_s = time.perf_counter()
        await open_session(self._link, session_id)
        await run_code(self._link, session_id)
        latency_s = time.perf_counter() - begin_s
        await close_session(self._link, session_id)
        return latency_s

    async def settle(self) -> None:
        """Do nothing: each session has ended."""


class ServiceLive:
    """Run in a live session over gRPC."""

    def __init__(self, link: WorkLink) -> None:
        self._link = link
        self._num = 0

    async def prepare(self, num: int) -> None:
        self._num = num
        for worker in range(num):
            await open_session(self._link, f"live-{worker}")

    async def once(self, worker: int) -> float:
        begin_s = time.perf_counter()
        await run_code(self._link, f"live-{worker}")
        return time.perf_counter() - begin_s

    async def settle(self) -> None:
        for worker in range(self._num):
            await close_session(self._link, f"live-{worker}")


async def open_session(link: WorkLink, session_id: str) -> None:
    opening = pb.OpenSession(profile=PROFILE, owner="bench")
    await link.request(pb.WorkRequest(session_id=session_id, open=opening), limit_s=LIMIT_S)


async def run_code(link: WorkLink, session_id: str) -> None:
    answer = await link.request(pb.WorkRequest(session_id=session_id, run=pb.RunCode(code=CODE)), limit_s=LIMIT_S)
    if answer.result.stdout.strip() != PRINTED:
        raise RuntimeError(f"the session returned {answer.result}")


async def close_session(link: WorkLink, session_id: str) -> None:
    await link.request(pb.WorkRequest(session_id=session_id, close=pb.CloseSession()), limit_s=LIMIT_S)


def _require(result: RunResult) -> None:
    if result.outcome is not RunOutcome.OK or result.stdout.strip() != PRINTED:
        raise RuntimeError(f"the session returned {result}")


class Service:
    """Run a sandbox node in this process until stdin is closed."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir

    async def __aenter__(self) -> WorkLink:
        self._process = self._execute()
        assert self._process.stdout is not None
        address = json.loads(await asyncio.to_thread(self._process.stdout.readline))
        self._link = WorkLink(address, lambda at: open_channel(at, access=ACCESS), inflight_max=1024)
        return self._link

    async def __aexit__(self, *exc: object) -> None:
        await self._link.close(limit_s=LIMIT_S)
        await asyncio.to_thread(self._process.communicate)

    def _execute(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", __name__, str(self._state_dir)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def _serve(state_dir: Path) -> None:
    config = SandboxConfig(warm=(PROFILE,))
    async with SandboxNode(config, node_id="sandbox-0", access=ACCESS, state_dir=state_dir) as node:
        print(json.dumps(node.address), flush=True)
        await asyncio.to_thread(sys.stdin.read)


def make_engine(state_dir: Path) -> JailEngine:
    return JailEngine(SandboxConfig(warm=(PROFILE,)), state_dir=state_dir, ids=RandomIds())


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
