"""Configuration of the depot."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from rollmesh.shared.config.settings import NonEmptyStr, NonNegativeFloat, NonNegativeInt, PositiveInt, Settings
from rollmesh.shared.membership.membership import MembershipConfig
from rollmesh.shared.rpc.server import ServerConfig


class DepotConfig(Settings):
    """Where the depot keeps versions, and how many."""

    directory: NonEmptyStr = "depot"
    """Folder of the blobs, used by this depot alone. On /dev/shm it is fast, and is lost when the host restarts;
    elsewhere it is durable."""
    quota_bytes: PositiveInt = 64 << 30
    """Most bytes stored; an upload beyond is refused as DISK_FULL. At least `versions_max` + 1 versions should fit."""
    versions_max: Annotated[int, Meta(ge=2)] = 4
    """Newest versions kept per policy of each run, one that is being uploaded included. Nodes fetch the newest; older
    ones serve nodes that are late, and a roll-back to a checkpoint uploads its own."""
    delta_bytes_max: NonNegativeInt = 256 << 20
    """Memory for deltas between versions, which nodes with the version before fetch instead of whole chunks. 0 computes
    none."""
    egress_bytes_per_s: NonNegativeFloat = 0.0
    """Limit of what the depot sends, in bytes per second; 0 means unlimited."""
    server: ServerConfig = ServerConfig()
    """The gRPC server."""
    membership: MembershipConfig = MembershipConfig()
    """The stream to the coordinator."""
