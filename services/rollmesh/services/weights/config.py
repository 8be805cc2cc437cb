"""Configuration of the depot."""

from __future__ import annotations

import msgspec

from rollmesh.shared.membership import MembershipConfig
from rollmesh.shared.rpc.server import ServerConfig


class DepotConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the depot keeps versions, and how many."""

    directory: str = "depot"
    """Folder of the blobs, the depot's own. On /dev/shm it is fast and gone with the host; elsewhere it is durable."""
    quota_bytes: int = 64 << 30
    """Most bytes stored; an upload beyond is refused as DISK_FULL. At least `versions_max` + 1 versions should fit."""
    versions_max: int = 4
    """Newest versions kept per policy of each run, one that is being uploaded included. Nodes fetch the newest; older ones serve nodes that
    are late, and a roll-back to a checkpoint uploads its own."""
    server: ServerConfig = ServerConfig()
    """The gRPC server."""
    membership: MembershipConfig = MembershipConfig()
    """The stream to the coordinator."""

    def __post_init__(self) -> None:
        if not self.directory:
            raise ValueError("directory must not be empty")
        if self.quota_bytes <= 0:
            raise ValueError(f"quota_bytes must be positive, got {self.quota_bytes}")
        if self.versions_max < 2:
            raise ValueError(f"versions_max must be at least 2 (one served, one uploaded), got {self.versions_max}")
