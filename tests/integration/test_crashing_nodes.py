"""Requests that kill the process of their node: the sends are bounded, and the attempt counts; a node that is away
costs no try."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from rollmesh.services.coordinator.fleet_keeper import FleetKeeper
from rollmesh.services.coordinator.peers import Outgoing
from rollmesh.services.rollout.failures import EpisodeFailed, to_failure
from rollmesh.shared.clients.reward import RewardClient, RewardClientConfig
from rollmesh.shared.clients.sandbox import SandboxClient, SandboxClientConfig
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.errors import ConnectionLost, MeshError, NoNode
from rollmesh.shared.net.ports import lasting_ports
from rollmesh.shared.net.retry import is_away
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.v1 import reward_pb2, types_pb2

from .script_process import script_process

ACCESS = Access(token="t")
TRIES_MAX = 3
LIMIT_S = 60.0

NODE = """
import asyncio, os, signal, sys
import grpc

class KilledByRequests(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.stream_stream_rpc_method_handler(count_and_die)

async def count_and_die(requests, context):
    async for _ in requests:
        with open(sys.argv[2], "ab") as file:
            file.write(b".")
        os.kill(os.getpid(), signal.SIGKILL)
    yield b""

async def main():
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((KilledByRequests(),))
    server.add_insecure_port(sys.argv[1])
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def node_that_restarts(address: str, count: Path) -> AsyncIterator[None]:
    """A node whose process each request kills, and which is started again each time."""

    async def keep() -> None:
        while True:
            with script_process(NODE, address, count, access=ACCESS) as one:
                await asyncio.to_thread(one.wait)

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


def connect(address: str) -> grpc.aio.Channel:
    return open_channel(address, access=ACCESS)


def reward_request(address: str) -> tuple[RewardClient, Callable[[], Awaitable[object]]]:
    config = RewardClientConfig(backoff_s=0.01, tries_max=TRIES_MAX)
    client = RewardClient(lambda: [address], connect, SystemClock(), config)
    item = reward_pb2.ScoreItem(task=types_pb2.Task(task_id="t"), samples=[types_pb2.Sample(sample_id="s")])
    return client, lambda: client.score("run", item)


def sandbox_client(address: str) -> SandboxClient:
    config = SandboxClientConfig(backoff_s=0.01, tries_max=TRIES_MAX, close_s_max=0.1)
    return SandboxClient(lambda: [address], connect, SystemClock(), config)


def session_request(address: str) -> tuple[SandboxClient, Callable[[], Awaitable[object]]]:
    client = sandbox_client(address)
    return client, lambda: client.session("calc", session_id="s").__aenter__()


def stateless_request(address: str) -> tuple[SandboxClient, Callable[[], Awaitable[object]]]:
    client = sandbox_client(address)
    return client, lambda: client.call_stateless("calc", "call", "1+1", tenant="run")


def judging_request(address: str) -> tuple[SandboxClient, Callable[[], Awaitable[object]]]:
    client = sandbox_client(address)
    return client, lambda: client.run_tests({"a.py": b""}, oracle_ref="o")


@pytest.mark.parametrize("make", [reward_request, session_request, stateless_request, judging_request])
async def test_a_request_that_kills_its_node_is_sent_a_bounded_number_of_times_and_counts(
    make: Callable[[str], tuple[RewardClient | SandboxClient, Callable[[], Awaitable[object]]]], tmp_path: Path
) -> None:
    address, count = f"127.0.0.1:{lasting_ports(1)[0]}", tmp_path / "requests"
    client, ask = make(address)
    async with node_that_restarts(address, count), asyncio.timeout(LIMIT_S):
        with pytest.raises(ConnectionLost) as caught:
            await ask()
        await client.close()
    assert "the connection to" in str(caught.value)
    assert to_failure(EpisodeFailed("score", caught.value)).reason != NoNode.reason, "such an attempt would not count"
    assert TRIES_MAX <= len(count.read_bytes()) <= 2 * TRIES_MAX, "a close is posted for each session that may be open"


async def test_a_group_that_kills_the_reward_node_is_distinguished_from_a_node_that_is_away(tmp_path: Path) -> None:
    """The coordinator repeats the request to finalize without limit only while the node is away."""
    address, count = f"127.0.0.1:{lasting_ports(1)[0]}", tmp_path / "requests"
    keeper = cast(FleetKeeper, SimpleNamespace(addresses=lambda kind, run: [address]))
    outgoing = Outgoing(keeper, access=ACCESS, call_s=LIMIT_S)

    async def failure() -> MeshError:
        with pytest.raises(MeshError) as caught:
            await outgoing.finalize_group(reward_pb2.FinalizeGroupRequest(run="run"))
        return caught.value

    assert is_away(await failure())
    async with node_that_restarts(address, count), asyncio.timeout(LIMIT_S):
        while is_away(error := await failure()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert isinstance(error, ConnectionLost)
    assert len(count.read_bytes()) == 1
    await outgoing.close()
