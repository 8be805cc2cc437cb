"""The cause of a session's end: an external kill never counts against the program, and a program's own act never as an
infrastructure failure."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime import cgroups
from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import PoolsConfig, ProfileConfig, SandboxConfig
from rollmesh.services.sandbox.engine import RunOutcome
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.services.sandbox.engines.zygote_process import SessionExit
from rollmesh.services.sandbox.sessions import SessionEnd, Sessions
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.ids import RandomIds
from rollmesh.shared.errors import SandboxFailed

from .process_tree import descendants

FILL = """
import os, signal
reading, writing = os.pipe()
if not os.fork():
    held = b"x" * (300 << 20)
    os.write(writing, b"full")
    signal.pause()
os.read(reading, 4)
if not (child := os.fork()):
    held = b"x" * (300 << 20)
    os._exit(0)
os.waitpid(child, 0)
"""
WAIT_S = 90.0
CONFIG = SandboxConfig(
    profiles={"python": ProfileConfig(limits={"call_s": 60.0})},
    grace_s=0.5,
    start_timeout_s=90.0,
    pools=PoolsConfig(ready_max=0),
)
LOWERED = "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass"
FORGED_REFUSAL = 'import os, time\nos.write(3, bytes([15, 0, 0, 0]) + b\'{"refused":"x"}\')\ntime.sleep(9)'
AT_TICKS = """
import resource, signal, time
seen = []
signal.signal(signal.SIGPROF, lambda *_: seen.append(time.monotonic()))
signal.setitimer(signal.ITIMER_PROF, 1e-6, 1e-6)
while len(seen) < 20: pass
period = min(later - earlier for earlier, later in zip(seen[5:], seen[6:]))
resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
while True:
    time.sleep(max(0.0, seen[-1] + period - 2e-4 - time.monotonic()))
    ticks = len(seen)
    while len(seen) == ticks: pass
"""
"""Code that runs only around each clock tick and is charged for the whole tick: the kernel kills it at a CPU limit that
it has hardly used."""


BOMB = """
import os, signal
reading, writing = os.pipe()
if not os.fork():
    os.read(reading, 1)
    held = b"x" * (300 << 20)
    os._exit(0)
held = b"x" * (400 << 20)
os.write(writing, b"x")
signal.pause()
"""
"""Code whose first process is the larger one, so that the kernel kills it."""


class Node:
    """Sessions over a jail engine."""

    def __init__(self, engine: JailEngine) -> None:
        self.engine = engine
        self.sessions = Sessions(engine, CONFIG, SystemClock())
        self.pid = 0
        """Return pid 1 of the most recently opened session, as a pid of the host."""

    async def open(self, session_id: str = "s") -> int:
        """Open a session and return its `pid`."""
        before = {process.pid for process in descendants(os.getpid())}
        await self.sessions.open(session_id, profile="python", limits={}, ttl_s=0, owner="test")
        new = [process for process in descendants(os.getpid()) if process.pid not in before]
        self.pid = new[-1].pid
        return self.pid

    @property
    def ended(self) -> dict[SessionEnd, int]:
        return {end: num for end, num in self.sessions.counts().ended.items() if num}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    engine = JailEngine(CONFIG, state_dir=tmp_path, ids=RandomIds())
    await engine.start()
    yield Node(engine)
    await engine.close()


async def begun(node: Node, code: str) -> asyncio.Task[object]:
    """Start a run that continues."""
    running: asyncio.Task[object] = asyncio.create_task(node.sessions.run("s", Program(code=code), 9.0))
    await asyncio.sleep(0)
    return running


async def refused(command: Awaitable[object]) -> None:
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(SandboxFailed, match="another process killed"):
            await command


async def test_a_running_session_killed_from_outside_is_infra(node: Node) -> None:
    pid = await node.open()
    running = await begun(node, "while True: pass")
    os.kill(pid, signal.SIGKILL)
    await refused(running)
    assert node.ended == {SessionEnd.LOST: 1}


async def test_a_kill_that_the_zygote_reports_late_is_infra(node: Node) -> None:
    """On a host without free memory, the zygote may need more than the grace period."""
    pid = await node.open()
    (zygote,) = {process.parent for process in descendants(os.getpid()) if process.pid == pid}
    running = await begun(node, "while True: pass")
    os.kill(zygote, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    asyncio.get_running_loop().call_later(3 * CONFIG.grace_s, os.kill, zygote, signal.SIGCONT)
    await refused(running)


async def test_an_idle_session_killed_from_outside_is_infra_at_its_next_command(node: Node) -> None:
    os.kill(await node.open("run"), signal.SIGKILL)
    os.kill(await node.open("files"), signal.SIGKILL)
    await refused(node.sessions.run("run", Program(code="1"), 1.0))
    await refused(node.sessions.put_files("files", {"a": b""}))
    assert node.ended == {SessionEnd.LOST: 2}


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("import os; os.kill(1, 9); os.kill(os.getpid(), 9); os._exit(7)", RunOutcome.EXITED),
        ("import os; os.close(3); import time; time.sleep(9)", RunOutcome.EXITED),
        (FORGED_REFUSAL, RunOutcome.EXITED),
        (LOWERED, RunOutcome.EXITED),
        (AT_TICKS, RunOutcome.EXITED),
        ("import ctypes; ctypes.string_at(0)", RunOutcome.EXITED),
        ("import os; os.abort()", RunOutcome.EXITED),
    ],
    ids=[
        "signals and exit",
        "closes its socket",
        "forges a refusal",
        "lowers its CPU limit",
        "lowers it and runs at ticks alone",
        "faults",
        "aborts",
    ],
)
async def test_what_a_program_does_to_its_session_is_its_own(node: Node, code: str, outcome: RunOutcome) -> None:
    await node.open()
    async with asyncio.timeout(WAIT_S):
        result = await node.sessions.run("s", Program(code=code), 60.0)
    assert (result.outcome, result.session_alive) == (outcome, False), result.error_message
    assert node.ended == {SessionEnd.EXITED: 1}


async def test_a_program_over_its_memory_limit_always_gets_a_memory_outcome(node: Node) -> None:
    await node.open()
    if group_of(node) is None:
        pytest.skip("no memory cgroup is writable here")
    await node.sessions.close("s")
    for _ in range(4):
        await node.open()
        async with asyncio.timeout(WAIT_S):
            result = await node.sessions.run("s", Program(code=BOMB), 9.0)
        assert (result.outcome, result.session_alive) == (RunOutcome.MEMORY, False), result.error_message
    assert node.ended == {SessionEnd.CLOSED: 1, SessionEnd.EXITED: 4}


async def test_the_account_of_memory_is_complete_when_the_end_is_known(node: Node) -> None:
    await node.open()
    live, kills = node.engine._live["s"], [False, True]
    live.memory_kills.any_new = kills.pop  # type: ignore[method-assign]
    reaped = live.zygote._sessions[live.key]
    live.zygote._finish(live.key, SessionExit(status=-signal.SIGKILL))
    assert reaped.done()
    assert not live.ended.done()
    ended = await node.engine._forks.gone(live)
    assert ended.out_of_memory


async def test_a_forged_reply_does_not_use_up_the_account_of_memory(node: Node) -> None:
    await node.open()
    live, kills = node.engine._live["s"], [False, True]
    live.memory_kills.any_new = kills.pop  # type: ignore[method-assign]
    forged = "import json, os, struct; b = json.dumps({'outcome': 'ok', 'exit_status': -9}).encode(); "
    forged += "os.write(3, struct.pack('<I', len(b)) + b); __import__('signal').pause()"
    assert (await node.sessions.run("s", Program(code=forged), 9.0)).outcome is RunOutcome.MEMORY
    os.kill(node.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        assert (await node.sessions.run("s", Program(code="1"), 1.0)).outcome is RunOutcome.MEMORY


def group_of(node: Node) -> cgroups.Cgroup | None:
    group: cgroups.Cgroup | None = node.engine._live["s"].slot.group
    return group if group is not None and "memory" in group.directories else None


async def test_a_memory_kill_is_reported_once_and_not_for_the_next_session_of_the_slot(node: Node) -> None:
    await node.open()
    if group_of(node) is None:
        pytest.skip("no memory cgroup is writable here")
    kills = node.engine._live["s"].memory_kills
    async with asyncio.timeout(WAIT_S):
        await node.sessions.run("s", Program(code=FILL), 9.0)
    assert kills.any_new()
    assert not kills.any_new()
    layout = node.engine._live["s"].slot
    await node.sessions.close("s")
    pid = await node.open()
    assert node.engine._live["s"].slot is layout
    running = await begun(node, "while True: pass")
    os.kill(pid, signal.SIGKILL)
    await refused(running)
