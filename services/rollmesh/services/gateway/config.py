"""Configuration of the gateway."""

from __future__ import annotations

import msgspec

from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.settings import PositiveFloat, PositiveInt, Settings


class GatewayConfig(Settings):
    """Settings of a gateway."""

    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    """Where it listens."""
    reads_max: PositiveInt = 16
    """Payloads read ahead per FetchSamples. More hide the bus's latency, and each may be as large as a record can be."""
    call_s: PositiveFloat = 30.0
    """Deadline of a decision whose caller set none, beyond the wait it asks for."""
