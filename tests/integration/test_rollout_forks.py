"""Forked sessions through the client, and forked lines of an episode: each has the state of its past and does not change the state of others."""

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
from rollmesh.shared.errors import InvalidInput, UnknownSnapshot
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.trajectory import EpisodeKey

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


async def test_session_that_cannot_be_forked_is_an_error(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (client, nodes), ToolBox(client, TOOLS, ["python"], KEY, 60.0) as tools:
        code = "class Odd:\n    def __setstate__(self, s): raise ValueError('no')\nodd = Odd(); odd.x = 1"
        await tools.call("python", code)
        with pytest.raises(InvalidInput, match="cannot load the name 'odd'"):
            await tools.fork()
        assert kept(nodes) == [0, 0]
