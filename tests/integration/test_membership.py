"""Joining the mesh over real gRPC: hello, heartbeats, commands, and a coordinator that goes and comes back."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

import pytest

from rollmesh.shared.clock import ManualClock
from rollmesh.shared.domain.protocol import PROTOCOL, ProtocolMismatch
from rollmesh.shared.errors import InvalidInput, Unauthenticated, Unavailable
from rollmesh.shared.membership.joined_node import JoinedNode
from rollmesh.shared.membership.membership import Membership, MembershipConfig, PassiveHandler
from rollmesh.shared.net.ports import lasting_ports
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.server import RpcServer, ServerConfig
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc

from .weight_mesh import ACCESS, MEMBERSHIP, TinyCoordinator, coordinator

JoinResponse = coordinator_pb2.JoinResponse


class Worker(PassiveHandler):
    """Counts its reports and remembers its commands."""

    def __init__(self) -> None:
        super().__init__(coordinator_pb2.NodeHello(node_id="w", kind=coordinator_pb2.NODE_KIND_ROLLOUT, capacity=3))
        self.num_reports = 0
        self.commands: list[str] = []
        self.obeyed = asyncio.Event()

    def report(self) -> coordinator_pb2.NodeReport:
        self.num_reports += 1
        return coordinator_pb2.NodeReport(num_running=self.num_reports)

    async def on_cancel(self, command: coordinator_pb2.CancelEpisodes) -> None:
        self.commands.append(f"cancel {','.join(command.lease_ids)}")

    async def on_drain(self) -> None:
        self.commands.append("drain")
        self.obeyed.set()


def member(address: str, worker: Worker, *, clock: ManualClock | None = None, access: Access = ACCESS) -> Membership:
    return Membership(address, access=access, handler=worker, clock=clock, config=MEMBERSHIP)


async def asleep(clock: ManualClock) -> None:
    async with asyncio.timeout(20):
        while not clock.num_sleepers():  # noqa: ASYNC110 (the clock has no event for it)
            await asyncio.sleep(0)


async def test_a_node_says_hello_and_reports_every_heartbeat() -> None:
    clock = ManualClock()
    async with coordinator(heartbeat_s=5.0) as (boss, address), member(address, Worker(), clock=clock) as node:
        await node.wait_joined()
        assert (boss.hellos[0].node_id, node.coordinator_id, node.waiting_for) == ("w", "c0", "")
        for num in (1, 2, 3):
            await boss.until(partial(boss.has_reports, num))
            await asleep(clock)  # the report may be here before its sender sleeps again
            await clock.run_for(5.0)
        assert [report.num_running for _, report in boss.reports[:3]] == [1, 2, 3]


async def test_an_urgent_report_does_not_wait_for_the_heartbeat() -> None:
    async with coordinator() as (boss, address), member(address, Worker(), clock=ManualClock()) as node:
        await boss.until(lambda: len(boss.reports) == 1)
        node.report_weights(coordinator_pb2.WeightReport(phase=coordinator_pb2.WeightReport.PHASE_ACTIVE))
        await boss.until(lambda: len(boss.weight_reports("w")) == 1)


async def test_the_last_report_is_sent_when_the_node_leaves() -> None:
    async with coordinator() as (boss, address):
        async with member(address, Worker(), clock=ManualClock()) as node:
            await boss.until(lambda: len(boss.reports) == 1)
            await node.stop()
            num_reports = len(boss.reports)
        assert num_reports == 2


async def test_commands_are_obeyed_in_order() -> None:
    worker = Worker()
    async with coordinator() as (boss, address), member(address, worker) as node:
        await node.wait_joined()
        for lease in ("l1", "l2"):
            boss.send("w", JoinResponse(cancel=coordinator_pb2.CancelEpisodes(lease_ids=[lease])))
        boss.send("w", JoinResponse(drain=coordinator_pb2.DrainCommand()))
        await asyncio.wait_for(worker.obeyed.wait(), 20)
        assert worker.commands == ["cancel l1", "cancel l2", "drain"]


async def test_the_fleet_is_the_newest_picture() -> None:
    async with coordinator() as (boss, address), member(address, Worker()) as node:
        await asyncio.wait_for(node.fleet.changed(since=0), 20)
        revision = node.fleet.revision
        depot = coordinator_pb2.FleetNode(
            node_id="d", kind=coordinator_pb2.NODE_KIND_DEPOT, address="h:1", state=coordinator_pb2.NODE_STATE_READY
        )
        boss.send("w", JoinResponse(fleet=coordinator_pb2.FleetView(nodes=[depot])))
        await asyncio.wait_for(node.fleet.changed(since=revision), 20)
        assert node.fleet.address_of(coordinator_pb2.NODE_KIND_DEPOT) == "h:1"
        assert node.fleet.address_of(coordinator_pb2.NODE_KIND_REWARD) is None


async def test_a_node_joins_again_when_its_stream_ends() -> None:
    async with coordinator() as (boss, address), member(address, Worker()) as node:
        await node.wait_joined()
        boss.hang_up("w")
        await boss.until(lambda: len(boss.hellos) == 2)


async def test_a_node_waits_for_a_coordinator_that_starts_later_and_for_one_that_restarts() -> None:
    (port,) = lasting_ports(1)
    address = f"127.0.0.1:{port}"
    async with member(address, Worker()) as node:
        with pytest.raises(Unavailable, match="is the coordinator running"):
            await node.wait_joined(timeout_s=0.05)
        for _ in range(2):
            async with RpcServer(ServerConfig(address=address, stop_s=0.0), access=ACCESS) as server:
                boss = TinyCoordinator()  # type: ignore[abstract]
                server.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, boss)
                await server.start()
                await boss.until(boss.has_hello)
                await node.wait_joined()


async def test_a_wrong_token_is_an_error_at_once_and_not_tried_for_ever() -> None:
    async with coordinator() as (_, address), member(address, Worker(), access=Access(token="wrong")) as node:
        with pytest.raises(Unauthenticated):
            await node.wait_joined()
        assert "refuses this node" in node.waiting_for


class Strict(TinyCoordinator):
    """Rejects every hello."""

    async def Join(self, request_iterator, context):  # type: ignore[no-untyped-def]
        await anext(aiter(request_iterator))
        raise InvalidInput("hello.address: empty")
        yield


async def test_a_refused_hello_is_an_error() -> None:
    async with RpcServer(ServerConfig(stop_s=0.0), access=ACCESS) as server:
        server.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, Strict())  # type: ignore[abstract]
        await server.start()
        async with member(server.address, Worker()) as node:
            with pytest.raises(InvalidInput, match=r"hello\.address: empty"):
                await node.wait_joined()


class Idle(JoinedNode):
    """A node without services."""

    kind = coordinator_pb2.NODE_KIND_ROLLOUT
    serves = False

    async def build(self, stack: AsyncExitStack) -> None: ...


async def test_a_node_leaves_a_coordinator_that_is_older_and_does_not_check_it() -> None:
    boss = TinyCoordinator()  # type: ignore[abstract]
    boss.protocol = None  # as releases before 1.1
    async with RpcServer(ServerConfig(stop_s=0.0), access=ACCESS) as server:
        server.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, boss)
        await server.start()
        node = Idle(node_id="w", access=ACCESS, coordinator=server.address, membership=MEMBERSHIP)
        async with node, asyncio.timeout(20):
            with pytest.raises(ProtocolMismatch, match=r"and the coordinator has 1\.0: upgrade the coordinator first"):
                await node.wait()
    assert boss.hellos[0].protocol.minor == PROTOCOL.minor


async def test_a_node_whose_hello_is_rejected_ends_with_that_error() -> None:
    async with RpcServer(ServerConfig(stop_s=0.0), access=ACCESS) as server:
        server.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, Strict())  # type: ignore[abstract]
        await server.start()
        node = Idle(node_id="w", access=ACCESS, coordinator=server.address, membership=MEMBERSHIP)
        async with node, asyncio.timeout(20):
            with pytest.raises(InvalidInput, match=r"hello\.address: empty"):
                await node.wait()


async def test_a_handler_that_is_stuck_loses_the_stream_not_the_memory() -> None:
    class Stuck(Worker):
        async def on_drain(self) -> None:
            await asyncio.Event().wait()

    config = MembershipConfig(commands_max=2, backoff_s=0.01, backoff_s_max=0.01)
    async with (
        coordinator() as (boss, address),
        Membership(address, access=ACCESS, handler=Stuck(), config=config) as node,
    ):
        await node.wait_joined()
        for _ in range(4):
            boss.send("w", JoinResponse(drain=coordinator_pb2.DrainCommand()))
        await boss.until(lambda: len(boss.hellos) == 2)
