"""Forked sessions through the client, and forked lines of an episode: each has the state of its past and does not
change the state of others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from rollmesh.services.rollout.config import ToolConfig
from rollmesh.services.rollout.tools import ToolBox
from rollmesh.services.sandbox.config import SandboxConfig
from rollmesh.services.sandbox.node import SandboxNode
from rollmesh.shared.clients.sandbox import SandboxClient
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.domain.trajectory import EpisodeKey
from rollmesh.shared.errors import UnknownSession, UnknownSnapshot
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import ServerConfig

ACCESS = Access(token="t")
TOOLS = {"python": ToolConfig(profile="python"), "calculator": ToolConfig(profile="calc", function="call")}
KEY = EpisodeKey(run="r", task="t", group="g", episode="e")


def connect(address: str) -> grpc.aio.Channel:
    return open_channel(address, access=ACCESS)


def node(folder: Path, name: str) -> SandboxNode:
    server = ServerConfig(stop_s=0.0)
    return SandboxNode(SandboxConfig(), node_id=name, access=ACCESS, state_dir=folder / name, server=server)


@asynccontextmanager
async def two_nodes(folder: Path) -> AsyncIterator[tuple[SandboxClient, list[SandboxNode]]]:
    async with node(folder, "a") as first, node(folder, "b") as second:
        client = SandboxClient(lambda: [first.address, second.address], connect, SystemClock())
        try:
            yield client, [first, second]
        finally:
            await client.close()


def kept(nodes: list[SandboxNode]) -> list[int]:
    return [node.core.snapshots.num_kept for node in nodes]


async def test_fork_goes_to_the_node_that_holds_the_snapshot(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (client, nodes), client.session("python", session_id="s") as session:
        await session.run("x = 1\nopen('a', 'w').write('1')")
        snapshot = await session.snapshot()
        async with (
            client.fork(snapshot, session_id="f1") as first,
            client.fork(snapshot, session_id="f2", owner="me") as second,
        ):
            await first.run("x += 1")
            assert [(await each.run("x, open('a').read()")).result for each in (session, first, second)] == [
                "(1, '1')",
                "(2, '1')",
                "(1, '1')",
            ]
            live = sorted(node.core.sessions.counts().live for node in nodes)
            assert live == [0, 3], "all on the snapshot's node, although the other is empty"
        await client.drop(snapshot)
        assert kept(nodes) == [0, 0]
        with pytest.raises(UnknownSnapshot):
            async with client.fork(snapshot, session_id="f3"):
                pass


async def test_restore_rolls_a_session_back(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (client, _), client.session("python", session_id="s") as session:
        await session.run("x = [1]")
        snapshot = await session.snapshot(ttl_s=60)
        await session.run("x.append(2)\ndel open")
        await session.restore(snapshot)
        assert (await session.run("x")).result == "[1]"
        await session.run("raise SystemExit")
        await session.restore(snapshot)
        assert (await session.run("x")).result == "[1]"


async def test_lines_of_a_tree_do_not_share_their_sandbox(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (client, nodes):
        async with ToolBox(client, TOOLS, ["python", "calculator"], KEY, 60.0) as tools:
            await tools.open()
            await tools.call("python", "x = 1\ng = (i for i in 'ab')")
            left, right = await tools.fork(), await tools.fork()
            assert left.lost == ("python: g",)
            await left.call("python", "x = 'left'\nopen('left', 'w').close()")
            deeper = await left.fork()
            await tools.call("python", "x = 'root'")
            code = "import os\nx, os.listdir('.')"
            seen = [(await each.call("python", code)).text for each in (tools, left, right, deeper)]
            assert seen == ["('root', [])", "('left', ['left'])", "(1, [])", "('left', ['left'])"]
            assert (await deeper.call("calculator", "2+3")).text == "5"
            assert kept(nodes) == [0, 0]
        await client.close()
        assert [node.core.sessions.counts().live for node in nodes] == [0, 0]


UNSAVED = {
    "an object does not load": ("class Odd:\n    def __setstate__(self, s): raise ValueError('no')\nodd = Odd(); odd.x = 1", "cannot load the name 'odd'"),
    "the working directory is removed": ("import os\nos.mkdir('d')\nos.chdir('d')\nos.rmdir('../d')", "FileNotFoundError"),
    "too deep folders": ("import os\nfor _ in range(2000):\n    os.mkdir('d')\n    os.chdir('d')", "cannot save the session"),
    "pickling ends the process": ("import os\nclass Odd:\n    def __reduce__(self): os._exit(0)\nodd = Odd()", "ended while it was saved"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSAVED)
async def test_a_session_that_prevents_its_own_snapshot_loses_its_state_and_not_the_episode(
    tmp_path: Path, case: str
) -> None:
    code, cause = UNSAVED[case]
    async with two_nodes(tmp_path) as (client, nodes), ToolBox(client, TOOLS, ["python"], KEY, 60.0) as tools:
        await tools.call("python", code)
        twin = await tools.fork()
        (lost,) = twin.lost
        assert lost.startswith("python: the session")
        assert cause in lost
        for each in (tools, twin):
            assert (await each.call("python", "1 + 1")).text == "2"
        assert kept(nodes) == [0, 0]
        assert sum(node.core.sessions.counts().live for node in nodes) == 2


async def test_a_session_that_the_node_has_closed_is_an_infra_failure_of_the_fork(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (client, nodes), ToolBox(client, TOOLS, ["python"], KEY, 60.0) as tools:
        await tools.call("python", "x = 1")
        for each in nodes:
            for session_id in list(each.core.sessions.owners()):
                await each.core.sessions.close(session_id)
        with pytest.raises(UnknownSession):
            await tools.fork()
