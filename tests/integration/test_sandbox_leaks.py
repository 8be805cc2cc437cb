"""Run 10,000 sessions over the real service process and kill it 20 times: nothing of them is left, seen from outside.

`make suite NAME=leaks` runs this test alone. ROLLMESH_SESSIONS and ROLLMESH_KILLS change its size.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollmesh.shared.clients.sandbox_link import WorkLink
from rollmesh.shared.errors import MeshError
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import sandbox_pb2 as pb

from .sandbox_leaks import Traces

NUM_SESSIONS = int(os.environ.get("ROLLMESH_SESSIONS", "10000"))
NUM_KILLS = int(os.environ.get("ROLLMESH_KILLS", "20"))
NUM_WORKERS = 12
WAIT_S = 60.0
ACCESS = Access(token="t")

SERVICE = """
import asyncio, json, sys
from pathlib import Path
from rollmesh.services.sandbox.config import SandboxConfig, SharedConfig
from rollmesh.services.sandbox.node import SandboxNode
from rollmesh.shared.rpc.access import Access

async def main():
    shared = SharedConfig(idle_s=0.5, calls_max=20)
    config = SandboxConfig(ttl_s=2.0, reap_every_s=0.2, shared=shared)
    node = SandboxNode(config, node_id="sandbox-0", access=Access(token="t"), state_dir=Path(sys.argv[1]))
    async with node:
        print(json.dumps(node.address), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        while node.core.sessions.counts().live:
            await asyncio.sleep(0.05)
        counts = node.core.sessions.counts()
    print(json.dumps([counts.created, {end.value: num for end, num in counts.ended.items()}]), flush=True)

asyncio.run(main())
"""
CODES = (
    "6 * 7",
    "open('file', 'w').write('x' * 100_000)",
    "import subprocess\nfor _ in range(2): subprocess.Popen(['setsid', 'sleep', '300'])",
    "import os\nif not os.fork():\n    while True: pass",
    "import os; os._exit(3)",
    "bytes(1 << 31)",
)


@dataclass
class Load:
    """Workers that open and use sessions and often do not close them."""

    chance: random.Random
    num_opened: int = 0
    num_failed: int = 0
    num_called: int = 0
    numbers: list[int] = field(default_factory=list)

    async def work(self, link: WorkLink, life: int, until: int) -> None:
        while self.num_opened < until:
            with suppress(MeshError):
                await self._one(link, f"{life}.{self.num_opened}.{self.chance.random()}")
                continue
            self.num_failed += 1
            await asyncio.sleep(0)

    async def _one(self, link: WorkLink, session_id: str) -> None:
        opening = pb.OpenSession(profile=self.chance.choice(("python", "calc")), owner="leaks")
        await link.request(pb.WorkRequest(session_id=session_id, open=opening), limit_s=WAIT_S)
        self.num_opened += 1
        if self.chance.random() < 0.2:
            call = pb.StatelessCall(function="call", arguments=["6*7"])
            tenant = self.chance.choice(("a", "b"))
            assert (await link.call(call, profile="calc", tenant=tenant, limit_s=WAIT_S)).result == "42"
            self.num_called += 1
        if self.chance.random() < 0.3:
            code = self.chance.choice(CODES)
            await link.request(pb.WorkRequest(session_id=session_id, run=pb.RunCode(code=code)), limit_s=WAIT_S)
        if self.chance.random() < 0.02:
            saving = pb.WorkRequest(session_id=session_id, snapshot=pb.SnapshotSession())
            await link.request(saving, limit_s=WAIT_S)
        if self.chance.random() < 0.8:
            await link.request(pb.WorkRequest(session_id=session_id, close=pb.CloseSession()), limit_s=WAIT_S)


class Service:
    """One run of the service process."""

    def __init__(self, state_dir: Path, tmp_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, str(state_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TMPDIR": str(tmp_dir)},
        )

    async def connect(self) -> WorkLink:
        address = json.loads(await self._line())
        return WorkLink(address, lambda at: open_channel(at, access=ACCESS), inflight_max=64)

    async def finish(self) -> tuple[int, dict[str, int]]:
        """Stop the service cleanly. Return the sessions created and ended in this run."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        created, ended = json.loads(await self._line())
        await asyncio.to_thread(self.process.wait)
        return created, ended

    async def _line(self) -> bytes:
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            return await asyncio.to_thread(self.process.stdout.readline)


async def until_empty(what: Callable[[], list[str]]) -> float:
    """Return the seconds until nothing is left."""
    begin_s = time.monotonic()
    while left := what():
        assert time.monotonic() - begin_s < WAIT_S, left[:20]
        await asyncio.sleep(0.02)
    return time.monotonic() - begin_s


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_no_session_leaves_a_trace_however_often_the_service_is_killed(tmp_path: Path) -> None:
    state_dir, tmp_dir = tmp_path / "state", tmp_path / "tmp"
    tmp_dir.mkdir()
    load, traces = Load(random.Random(7)), Traces(state_dir, tmp_dir)
    gone_s: list[float] = []
    for life in range(NUM_KILLS + 1):
        service = Service(state_dir, tmp_dir)
        link = await service.connect()
        if life:
            await until_empty(lambda: [line for line in traces.left() if "groups-" not in line])
        until = NUM_SESSIONS * (life + 1) // (NUM_KILLS + 1)
        workers = [asyncio.create_task(load.work(link, life, until)) for _ in range(NUM_WORKERS)]
        await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
        assert traces.note(service.process.pid) >= 2, "a launcher and a zygote at least"
        if life < NUM_KILLS:
            service.process.kill()
            service.process.wait()
            gone_s.append(await until_empty(traces.living))
        await asyncio.wait(workers)
        await link.close(limit_s=1.0)
    created, ended = await service.finish()
    assert created == sum(ended.values())
    gone_s.append(await until_empty(traces.living))
    assert traces.left() == []
    assert load.num_opened >= NUM_SESSIONS
    assert load.num_called > NUM_SESSIONS // 10
    print(
        f"\n{load.num_opened:,} sessions, {load.num_called:,} calls in shared sessions, {NUM_KILLS} kills, {load.num_failed} commands failed with them; "
        f"all gone after {max(gone_s):.2f} s at most; last life: {created} created, {ended}"
    )
