"""Configuration of the gateway."""

from __future__ import annotations

import msgspec

from rollmesh.shared.rpc.server import ServerConfig


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a gateway."""

    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    """Where it listens."""
    reads_max: int = 16
    """Payloads read ahead per FetchSamples. More hide the bus's latency, and each may be as large as a record can be."""
    call_s: float = 30.0
    """Deadline of a decision whose caller set none, beyond the wait it asks for."""

    def __post_init__(self) -> None:
        if self.reads_max < 1:
            raise ValueError(f"reads_max must be positive, got {self.reads_max}")
        if self.call_s <= 0:
            raise ValueError(f"call_s must be positive, got {self.call_s}")
