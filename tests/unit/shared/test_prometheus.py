"""/metrics under a flood of half and whole requests: connections and threads are bounded, and scrapes share a
collection."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.rpc.server import RpcServer
from rollmesh.shared.telemetry import prometheus
from rollmesh.shared.telemetry.metrics import Reading, gauge
from rollmesh.shared.telemetry.prometheus import CONNECTIONS_MAX, PrometheusMeter

ACCESS = Access(token="token")
HALF = b"GET /metrics HTTP/1.1\r\nHost: here\r\n"
NUM = 300
VALUE = gauge("rollmesh_value", "A value.")


class Readings:
    """A source that counts how often it is read."""

    def __init__(self) -> None:
        self.num = 0

    async def __call__(self) -> Sequence[Reading]:
        self.num += 1
        return [Reading(VALUE, 7.0)]


@contextlib.asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[str, int, Readings]]:
    meter, source = PrometheusMeter(), Readings()
    meter.add_source("n", source)
    address = await meter.serve("127.0.0.1", 0, folder=folder, process="p")
    host, _, port = address.rpartition(":")
    try:
        yield host, int(port), source
    finally:
        await meter.close()


async def replies(connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> list[bytes]:
    """Send the rest of each request and read until its end; empty for a connection that was closed."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        with contextlib.suppress(ConnectionError):
            writer.write(b"Connection: close\r\n\r\n")
            await writer.drain()
            return await reader.read()
        return b""

    return await asyncio.gather(*(one(*each) for each in connections))


async def test_half_and_whole_requests_of_metrics_leave_the_process_alone(tmp_path: Path) -> None:
    threads = threading.active_count()
    async with (
        asyncio.timeout(60),
        served(tmp_path) as (host, port, source),
        RpcServer(access=ACCESS) as server,
    ):
        await server.start()
        opened = await asyncio.gather(*(asyncio.open_connection(host, port) for _ in range(NUM)))
        for _, writer in opened:
            writer.write(HALF)
        async with open_channel(server.address, access=ACCESS) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=20)).status == 1
            got = await replies(opened)
            assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=20)).status == 1
        answered = [answer for answer in got if answer]
        assert len(answered) <= CONNECTIONS_MAX
        assert all(b'rollmesh_value{node="n"} 7.0' in answer for answer in answered)
        assert source.num <= 10, "simultaneous scrapes share a collection"
        assert threading.active_count() - threads < 20
        for _, writer in opened:
            writer.close()
        (again,) = await replies([await half(host, port)])
        assert b"HTTP/1.1 200" in again


async def half(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(HALF)
    return reader, writer


async def test_a_scrape_gets_new_values_once_the_last_text_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "FRESH_S", 0.0)
    async with served(tmp_path) as (host, port, source), asyncio.timeout(20):
        while source.num < 3:
            await replies([await half(host, port)])


@pytest.mark.parametrize(
    ("request_line", "status"), [(b"POST /metrics", b"405"), (b"GET /other", b"404"), (b"HEAD /metrics", b"200")]
)
async def test_only_metrics_are_served(tmp_path: Path, request_line: bytes, status: bytes) -> None:
    async with served(tmp_path) as (host, port, _), asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(HALF.replace(b"GET /metrics", request_line))
        (answer,) = await replies([(reader, writer)])
        assert answer.startswith(b"HTTP/1.1 " + status)
