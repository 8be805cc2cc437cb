"""Many connections that ask for nothing, or never finish to ask, stop neither a run nor the servers that they are open
to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rollmesh.client import Client
from rollmesh.mesh import Mesh, MeshConfig
from rollmesh.mesh.mesh_services import service_names
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.rpc.access import Access
from rollmesh.shared.rpc.channel import open_channel
from rollmesh.shared.telemetry.prometheus import FOLDER
from rollmesh.v1 import run_pb2, run_pb2_grpc

from ..chaos.world import mesh_config, save_model_folder
from . import door_agent
from .trainer import drive, spec, whole_run

UPDATES = 3
LIMIT_S = 120.0
CONNECT_S = 2.0
"""Limit of a connect. A server that has reached its limit of connections accepts no more, and the backlog of its socket
fills."""
UNFINISHED = (
    b"",
    b"G",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Long: " + b"x" * 100_000,
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n{",
    b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 50,  # of which no reply is read
)


def config_of(folder: Path) -> MeshConfig:
    config = mesh_config(save_model_folder(folder / "model"))
    agent = Extension(f"{Path(door_agent.__file__)}:Served")
    rollout = msgspec.structs.replace(config.rollout, agent=agent)
    telemetry = msgspec.structs.replace(config.telemetry, metrics="prometheus")
    return msgspec.structs.replace(config, rollout=rollout, telemetry=telemetry)


@pytest.mark.parametrize("num", [40, pytest.param(400, marks=pytest.mark.slow)])
async def test_open_connections_stop_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    """`num` connections of each kind to each HTTP server, and `num` streams of the gateway."""
    config = config_of(tmp_path)
    door = tmp_path / "door"
    monkeypatch.setenv(door_agent.ADDRESS_FILE, str(door))
    services = [name for name in service_names(config) if name != "learner"]
    async with Mesh(config, run_dir=tmp_path / "run", services=services) as mesh, asyncio.timeout(LIMIT_S):
        finished = asyncio.create_task(mesh.finished())
        async with Client(mesh.gateway_address, token=mesh.access.token) as client:
            await whole_run(client, "before", updates_max=1)
            made = await client.create_run(spec("during", updates_max=UPDATES))
            metrics = [
                json.loads(file.read_text())[0]["targets"][0] for file in (tmp_path / "run" / FOLDER).glob("*.json")
            ]
            assert metrics
            async with (
                unfinished_requests([*metrics, door.read_text()], num),
                watching(mesh.gateway_address, mesh.access, "during", num),
            ):
                assert len(await drive(made)) == UPDATES
            for address in metrics:
                assert await status_of(address, "/metrics") == 200
            assert await status_of(door.read_text(), "/v1/models") == 401, "without a key"
            assert len(await whole_run(client, "afterwards", updates_max=1)) == 1
        assert not finished.done()
        finished.cancel()


@asynccontextmanager
async def unfinished_requests(addresses: list[str], num: int) -> AsyncIterator[None]:
    """Hold `num` connections of each kind to each address. The server may close them."""
    opened: list[asyncio.StreamWriter] = []
    try:
        for address in addresses:
            host, _, port = address.rpartition(":")
            for number in range(num):
                try:
                    async with asyncio.timeout(CONNECT_S):
                        reader, writer = await asyncio.open_connection(host, int(port))
                except (OSError, TimeoutError):
                    break  # it has as many as it accepts
                reader._transport.pause_reading()  # type: ignore[attr-defined]
                opened.append(writer)
                writer.write(UNFINISHED[number % len(UNFINISHED)])
        assert opened
        yield
    finally:
        for writer in opened:
            writer.transport.abort()


@asynccontextmanager
async def watching(gateway: str, access: Access, run: str, num: int) -> AsyncIterator[None]:
    """Hold streams that are not read beyond their first message. The gateway may reject some."""
    async with AsyncExitStack() as stack:
        calls: list[Any] = []
        for _ in range(0, num, 100):
            channel = await stack.enter_async_context(open_channel(gateway, access=access))
            stub: Any = run_pb2_grpc.RunServiceStub(channel)
            calls += [stub.WatchRun(run_pb2.WatchRunRequest(run=run)) for _ in range(100)]
        try:
            yield
        finally:
            for call in calls:
                call.cancel()


async def status_of(address: str, path: str) -> int:
    """Return the status of a GET request."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()
