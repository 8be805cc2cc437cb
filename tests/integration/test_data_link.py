"""The client of private extras over real gRPC: what it repeats, and what it reports."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.services.rollout.data_link import DataLink
from rollmesh.shared.clock import SystemClock
from rollmesh.shared.errors import InfraFailure, MeshError, NoNode, NotReady, Overloaded, Unimplemented, UnknownTask
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import RpcServer
from rollmesh.v1 import data_pb2, data_pb2_grpc


class Data(data_pb2_grpc.DataServiceServicer):
    """A data service that fails with the errors of `failures`, and then returns `extras`."""

    def __init__(self, *failures: MeshError, **extras: str) -> None:
        self.failures, self.extras = list(failures), extras
        self.asked: list[data_pb2.GetPrivateExtrasRequest] = []

    async def GetPrivateExtras(
        self, request: data_pb2.GetPrivateExtrasRequest, context: object
    ) -> data_pb2.GetPrivateExtrasResponse:
        self.asked.append(request)
        if self.failures:
            raise self.failures.pop(0)
        return data_pb2.GetPrivateExtrasResponse(extras=self.extras)


def data(*failures: MeshError, **extras: str) -> Data:
    return Data(*failures, **extras)  # type: ignore[abstract]  # the other calls return UNIMPLEMENTED


@asynccontextmanager
async def linked(
    *services: data_pb2_grpc.DataServiceServicer, ready_after: int = 0, give_up_s: float = 120.0
) -> AsyncIterator[DataLink]:
    """A link to data nodes that join after `ready_after` looks at the fleet."""
    looks = itertools.count()
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(RpcServer(access=Access(token="t"))) for _ in services]
        for server, service in zip(servers, services, strict=True):
            server.add(data_pb2_grpc.add_DataServiceServicer_to_server, service)
            await server.start()
        link = DataLink(
            lambda: [server.address for server in servers] if next(looks) >= ready_after else [],
            lambda address: open_channel(address, access=Access(token="t")),
            SystemClock(),
            WorkerConfig(backoff_s=0.001, backoff_s_max=0.002, give_up_s=give_up_s),
        )
        try:
            yield link
        finally:
            await link.close()


def ask(link: DataLink) -> Awaitable[Mapping[str, object]]:
    return link.private_extras(run="r", split="train", task_id="t", names=("solution", "turns"))


async def test_the_link_repeats_what_can_succeed_and_decodes_the_values() -> None:
    service = data(NotReady("not yet"), Overloaded("full"), solution='"x"', turns="[1]")
    async with linked(service, ready_after=2) as link:
        assert await ask(link) == {"solution": "x", "turns": [1]}
        assert link.waiting_for == ""
    sent = service.asked[-1]
    assert len(service.asked) == 3
    assert (sent.run, sent.split, sent.task_id, list(sent.names)) == ("r", "train", "t", ["solution", "turns"])


async def test_the_link_does_not_repeat_an_unknown_task_and_stops_at_its_limit() -> None:
    async with linked(data(UnknownTask("no task", task="t"))) as link:
        with pytest.raises(UnknownTask):
            await ask(link)
    async with linked(data(), ready_after=10**9, give_up_s=0.02) as link:
        asked = asyncio.ensure_future(ask(link))
        await asyncio.sleep(0)
        assert link.waiting_for.startswith("1 requests for private extras are retried: no data node has joined")
        with pytest.raises(NoNode, match="no data node has joined; start one"):
            await asked
        assert link.waiting_for == ""
    async with linked(data(solution="{")) as link:
        with pytest.raises(InfraFailure, match="the extra 'solution' is not JSON"):
            await ask(link)


async def test_a_node_of_an_older_protocol_is_skipped_and_named_if_there_is_no_other() -> None:
    old = data_pb2_grpc.DataServiceServicer()  # type: ignore[abstract]
    async with linked(old, data(solution="1")) as link:
        assert [await ask(link) for _ in range(3)] == [{"solution": 1}] * 3
    async with linked(old) as link:
        with pytest.raises(
            Unimplemented, match=r"127.0.0.1:\d+ has protocol 1.0, .*; upgrade it, or remove rollout.priv"
        ):
            await ask(link)
