"""Open the streams of a run folder, whether the run is running or not. Only the files of the NATS server are
written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollmesh.app.config import TrainConfig
from rollmesh.app.run_folder import RunFolder
from rollmesh.mesh.run_layout import RunLayout, open_layout
from rollmesh.mesh.run_lock import still_starting
from rollmesh.shared.bus.bus import Bus, BusUnavailable
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.errors import ConfigError


@asynccontextmanager
async def run_bus(folder: RunFolder, config: TrainConfig) -> AsyncIterator[Bus]:
    """Connect to the bus of a run: the configured cluster, the server that runs on its folder, or one started for the
    call.

    Raises ConfigError if the run was never started or its streams were removed, NotReady while it starts,
    BusUnavailable if the bus cannot be reached.
    """
    if not folder.was_started:
        if starting := still_starting(folder.root):
            raise starting
        raise ConfigError(f"{folder.root}: the run was never started, so it has no streams; start it first")
    if folder.ledger_was_removed:
        raise ConfigError(
            f"{folder.root}: the ledger and the streams of this run were removed by `rollmesh clean --for-good`; "
            f"what remains is its audit in {folder.audit.name}",
            path=folder.root,
        )
    layout = open_layout(config, run_dir=folder.root, base_dir=Path(folder.read_origin().base_dir))
    async with nats_of(layout) as url, _connected(layout, url) as bus:
        yield bus


@asynccontextmanager
async def nats_of(layout: RunLayout) -> AsyncIterator[str]:
    """Yield the URL of the NATS server of the run."""
    if layout.config.bus.url:
        yield layout.config.bus.url
        return
    server = layout.bus_server()
    try:
        await server.start()
    except BusUnavailable as err:
        url = server.known_url()  # the server of a running run uses this folder
        if not url:
            if starting := still_starting(layout.run_dir):
                raise starting from err
            raise
        yield url
        return
    try:
        yield server.url
    finally:
        await server.stop()


@asynccontextmanager
async def _connected(layout: RunLayout, url: str) -> AsyncIterator[Bus]:
    bus = layout.with_payloads(await JetStreamBus.connect(url, login=layout.bus_login()))
    try:
        yield bus
    finally:
        await bus.close()
