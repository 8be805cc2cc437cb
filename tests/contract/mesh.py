"""Meshes for the sequences: one in this process, and one of processes under the supervisor whose services are
killed."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc

from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.login import BusLogin
from rollmesh.shared.rpc.channel import ChannelConfig, open_channel
from rollmesh.v1 import coordinator_pb2 as pb
from rollmesh.v1 import coordinator_pb2_grpc, run_pb2_grpc

from ..chaos.world import World, mesh_config, save_model_folder, world
from ..integration.coordinator_mesh import ACCESS, coordinator_mesh
from . import dropping
from .ends import Ends

HOSTS = {name: (name,) for name in ("nats", "coordinator", "gateway", "depot", "reward", "data")}
"""Processes of the mesh in which services are killed. The player is its worker and its trainer."""
NATS_SERVER = "nats-server"
READY_S = 60.0
SERVES_S = 300.0
BURST = 4
"""Number of kills after which the mesh may recover."""


@asynccontextmanager
async def quiet_mesh(folder: Path) -> AsyncIterator[Ends]:
    """Real nats-server, coordinator, gateway, data, reward and depot in this process, without kills."""
    async with coordinator_mesh(folder, finalizer=dropping.NAME) as parts:
        yield Ends(parts.run, parts.coordinator, parts.address, parts.bus, ACCESS)


@asynccontextmanager
async def process_mesh(folder: Path) -> AsyncIterator[tuple[Ends, World]]:
    """The same services as processes that the supervisor restarts."""
    config = mesh_config(save_model_folder(folder / "model"), finalizer=dropping.NAME)
    async with world(folder, config, HOSTS) as mesh, AsyncExitStack() as stack:
        layout = mesh.layout
        port = layout.folder("nats") / "port"
        await mesh.until("nats serves", port.is_file, limit_s=READY_S)
        bus = await JetStreamBus.connect(
            f"nats://127.0.0.1:{port.read_text().strip()}", login=BusLogin.of(layout.access)
        )
        stack.push_async_callback(bus.close)
        channels = ChannelConfig(wait_for_ready=True)
        outer = await stack.enter_async_context(open_channel(layout.gateway, access=layout.access, config=channels))
        inner = await stack.enter_async_context(open_channel(layout.coordinator, access=layout.access, config=channels))
        yield (
            Ends(
                run_pb2_grpc.RunServiceStub(outer),
                coordinator_pb2_grpc.CoordinatorServiceStub(inner),
                layout.coordinator,
                bus,
                layout.access,
                bus_address=f"127.0.0.1:{port.read_text().strip()}",
            ),
            mesh,
        )


async def kill_at_random(ends: Ends, mesh: World, rng: random.Random, killed: Counter[str]) -> None:
    """SIGKILL a process of the mesh every one to four seconds, until cancelled.

    After each `BURST` kills, wait until the mesh serves again. Without it, a slow host would never have a whole mesh,
    and every call would end as UNAVAILABLE, which is correct and tests nothing.
    """
    for num in itertools.count(1):
        await asyncio.sleep(rng.uniform(1.0, 4.0))
        if num % BURST == 0:
            await _until_it_serves(ends)
        victim = rng.choice([*HOSTS, NATS_SERVER])
        with suppress(ProcessLookupError, KeyError, ValueError):  # it has not been restarted yet
            if victim == NATS_SERVER:
                mesh.kill_nats_server()
            else:
                mesh.kill(victim)
            killed[victim] += 1


async def _until_it_serves(ends: Ends) -> None:
    """Wait until NATS, the coordinator and a node of each kind that a trainer needs accept connections."""
    needed = {pb.NODE_KIND_GATEWAY, pb.NODE_KIND_DEPOT, pb.NODE_KIND_DATA, pb.NODE_KIND_REWARD}
    async with asyncio.timeout(SERVES_S):
        while True:
            with suppress(grpc.aio.AioRpcError, OSError):
                await _connect(ends.bus_address)
                fleet = await ends.coordinator.GetFleet(pb.GetFleetRequest(), timeout=5.0)
                ready = [node for node in fleet.nodes if node.state == pb.NODE_STATE_READY and node.kind in needed]
                for node in ready:
                    await _connect(node.address)
                if needed == {node.kind for node in ready}:
                    return
            await asyncio.sleep(0.2)


async def _connect(address: str) -> None:
    """Raises OSError if no process listens at host:port."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    await writer.wait_closed()
