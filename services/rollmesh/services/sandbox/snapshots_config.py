"""Configuration of a node's snapshots."""

from __future__ import annotations

import msgspec


class SnapshotsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many snapshots a node keeps, how large, for how long."""

    snapshots_max: int = 1024
    """Snapshots on the node; more are refused as OVERLOADED. None is ever dropped to make room for another."""
    tenant_snapshots_max: int = 256
    """Snapshots of one tenant; sessions without a tenant are one together."""
    bytes_max: int = 8 << 30
    """Bytes of all snapshots, on the disk that holds the node's state directory."""
    tenant_bytes_max: int = 2 << 30
    """Bytes of one tenant's snapshots."""
    snapshot_bytes_max: int = 256 << 20
    """Bytes of one snapshot: files and pickled values together."""
    ttl_s: float = 600.0
    """Seconds without a fork or restore after which a snapshot is dropped, where its taker names none."""
    ttl_s_max: float = 7200.0
    """Longest time to live a taker may ask for."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"snapshots.{name} must be positive, got {getattr(self, name)}")
        if self.ttl_s > self.ttl_s_max:
            raise ValueError(f"snapshots.ttl_s must not exceed snapshots.ttl_s_max {self.ttl_s_max}, got {self.ttl_s}")
