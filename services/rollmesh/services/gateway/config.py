"""Configuration of the gateway."""

from __future__ import annotations

import msgspec

from rollmesh.services.gateway.page.config import PageConfig
from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings
from rollmesh.shared.rpc.server import ServerConfig


class GatewayConfig(Settings):
    """Settings of a gateway."""

    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    """Address and limits of the server."""
    reads_max: PositiveInt = 16
    """Payloads read ahead per FetchSamples. More payloads hide the latency of the bus; each may have the maximum record
    size."""
    forwarded_max: PositiveInt = 960
    """Maximum number of streams (WatchRun, PrefetchSamples, FetchModelFiles) that are forwarded to the coordinator, of
    forwarded calls of LeaseBatch that wait, and of forwarded calls of OpenEpisode and FinishEpisode; more are rejected
    with RESOURCE_EXHAUSTED. It must be below `coordinator.server.connection_rpcs_max`, beyond which calls would wait in
    the gateway."""
    page: PageConfig = msgspec.field(default_factory=PageConfig)
    """The live page for browsers."""
    call_s: PositiveFloat = 30.0
    """Deadline of a forwarded call without a deadline, in addition to its requested wait, in seconds."""
