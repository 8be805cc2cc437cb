"""The plain health server for probes."""

from __future__ import annotations

import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.mesh.probes import LIVE, READY, ProbeServer
from rollmesh.shared.errors import ConfigError
from rollmesh.shared.net.ports import lasting_ports
from rollmesh.v1 import coordinator_pb2, coordinator_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def check(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return int((await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)).status)


def free_address() -> str:
    return f"127.0.0.1:{lasting_ports(1)[0]}"


async def test_a_process_is_live_at_once_and_ready_when_it_takes_work() -> None:
    address, takes_work = free_address(), [False]
    async with ProbeServer(address, ready=lambda: takes_work[0]):
        assert (await check(address, LIVE), await check(address, READY)) == (SERVING, NOT_SERVING)
        takes_work[0] = True
        assert (await check(address, LIVE), await check(address, READY)) == (SERVING, SERVING)


async def test_it_serves_no_other_name_and_no_other_method() -> None:
    address = free_address()
    async with ProbeServer(address, ready=lambda: True):
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await check(address, "rollmesh.v1.RunService")
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetFleet(coordinator_pb2.GetFleetRequest(), timeout=5.0)
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
            health: Any = health_pb2_grpc.HealthStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as watched:
                async for _ in health.Watch(health_pb2.HealthCheckRequest(), timeout=5.0):
                    pass
            assert watched.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_taken_address_is_a_mistake_of_the_configuration() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"`network\.probes`: cannot listen on"):
            async with ProbeServer(address, ready=lambda: True):
                pass
