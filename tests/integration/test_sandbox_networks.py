"""Network namespaces: no two live sessions share one, none is the host's, and a slot's next session finds nothing of
the previous one."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmesh.sandbox_runtime.program import Program
from rollmesh.services.sandbox.config import PoolsConfig, SandboxConfig
from rollmesh.services.sandbox.engines.jail_engine import JailEngine
from rollmesh.shared.domain.ids import RandomIds

from .process_tree import descendants

BIND = """
import socket
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
ours.bind("\\0meeting point")
"""


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[JailEngine]:
    made = JailEngine(SandboxConfig(pools=PoolsConfig(ready_max=0)), state_dir=tmp_path, ids=RandomIds())
    await made.start()
    yield made
    await made.close()


async def open_session(engine: JailEngine, session_id: str) -> str:
    """Open a session and return its network namespace."""
    before = {process.pid for process in descendants(os.getpid())}
    await engine.open(session_id, "python", engine.limits("python"))
    (pid,) = [
        process.pid
        for process in descendants(os.getpid())
        if process.pid not in before and not descendants(process.pid)
    ]
    return os.readlink(f"/proc/{pid}/ns/net")


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
async def test_live_sessions_share_no_network_and_a_slot_keeps_its_own(engine: JailEngine) -> None:
    networks = [await open_session(engine, name) for name in "abc"]
    assert len({*networks, os.readlink("/proc/self/ns/net")}) == 4
    await engine.end("b")
    assert await open_session(engine, "d") == networks[1]
    assert await open_session(engine, "e") not in networks


async def test_no_name_can_be_left_in_a_network_for_the_next_session_of_a_slot(engine: JailEngine) -> None:
    await engine.open("a", "python", engine.limits("python"))
    assert (await engine.run("a", Program(code=BIND), 5.0)).error_type == "PermissionError"
