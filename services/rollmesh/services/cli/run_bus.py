"""The streams of a run folder, whether the run is running or not. Nothing but the server's own files is written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollmesh.services.cli.config import TrainConfig
from rollmesh.services.cli.run_folder import RunFolder
from rollmesh.shared.bus.bus import Bus, BusUnavailable
from rollmesh.shared.bus.embedded_server import EmbeddedServer
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.errors import ConfigError


@asynccontextmanager
async def run_bus(folder: RunFolder, config: TrainConfig) -> AsyncIterator[Bus]:
    """The run's bus: the cluster of its configuration, the server that runs over its folder, or one started for the while.

    Raises ConfigError if the run never had one, BusUnavailable if it cannot be reached.
    """
    if config.bus.url:
        async with _connected(config.bus.url, config.bus.token) as bus:
            yield bus
        return
    path = folder.root / "token"
    if not path.exists():
        raise ConfigError(f"{folder.root}: the run was never started, there is nothing to read; start it first")
    token = path.read_text().strip()
    server = EmbeddedServer(folder.root / "nats", token=token, config=config.bus.embedded)
    try:
        await server.start()
    except BusUnavailable:
        url = server.known_url()  # a running run has a server of its own over this folder
        if not url:
            raise
        async with _connected(url, token) as bus:
            yield bus
        return
    try:
        async with _connected(server.url, token) as bus:
            yield bus
    finally:
        await server.stop()


@asynccontextmanager
async def _connected(url: str, token: str) -> AsyncIterator[Bus]:
    bus = await JetStreamBus.connect(url, token=token)
    try:
        yield bus
    finally:
        await bus.close()
