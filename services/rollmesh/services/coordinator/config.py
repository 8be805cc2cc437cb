"""Configuration of the coordinator."""

from __future__ import annotations

import msgspec

from rollmesh.services.coordinator.core.fleet import FleetConfig
from rollmesh.shared.bus.run_streams import StreamLimits
from rollmesh.shared.rpc.server import ServerConfig


class FleetLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a silent node is given up, and how long one may work on a weight command."""

    heartbeat_s: float = 1.0
    """Seconds between the reports of a node."""
    suspect_after_s: float = 5.0
    """Silence after which a node gets nothing new."""
    dead_after_s: float = 15.0
    """Silence after which its work is given to others: short wastes work on a busy machine, long delays it after a crash."""
    prepare_s_max: float = 120.0
    """Time a node has for one weight command before it is sent again."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not self.heartbeat_s < self.suspect_after_s <= self.dead_after_s:
            raise ValueError(
                f"suspect_after_s must lie above heartbeat_s = {self.heartbeat_s} and not above dead_after_s = "
                f"{self.dead_after_s}, got {self.suspect_after_s}"
            )

    def for_core(self) -> FleetConfig:
        """The same as the core knows it."""
        return FleetConfig(**{name: getattr(self, name) for name in self.__struct_fields__})


class RunLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one run's driver."""

    inputs_max: int = 8192
    """Questions waiting for a decision; more are refused with OVERLOADED."""
    releases_max: int = 2048
    """Decisions waiting to be stored; then deciding waits."""
    tick_s: float = 0.1
    """How late a deadline may be noticed."""
    append_s_max: float = 120.0
    """How long the ledger may be out of reach before the coordinator stops; a restart of NATS must fit."""
    watch_interval_s: float = 0.25
    """Shortest time between two states sent to one watcher."""
    watch_idle_s: float = 5.0
    """Longest time between them: who waits for what changes without a fact."""
    snapshot_records: int = 2000
    """Ledger records between snapshots; recovery replays at most about as many."""
    housekeeping_s: float = 2.0
    """Seconds between looks at what can be snapshotted and purged."""
    ended_idle_s: float = 5.0
    """Seconds without a request after which a run that has ended is not led any longer; the next request recovers it."""
    calls_max: int = 64
    """Calls to the reward service under way at once."""
    finalize_tries_max: int = 10
    """Calls for one group that the reward service fails, before the group ends as failed(NOT_FINALIZED)."""
    call_s: float = 30.0
    """Deadline of one call to another service."""
    backoff_s: float = 0.05
    """First pause after a failed call; doubles up to `backoff_s_max`."""
    backoff_s_max: float = 2.0
    """Longest pause between tries."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")


class CoordinatorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a coordinator."""

    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    """Where it listens."""
    fleet: FleetLimits = msgspec.field(default_factory=FleetLimits)
    """Silence and weight commands."""
    run: RunLimits = msgspec.field(default_factory=RunLimits)
    """Limits per run."""
    streams: StreamLimits = msgspec.field(default_factory=StreamLimits)
    """Disk per stream of a live run; an ended run keeps what it holds and a little room."""
    runs_max: int = 64
    """Live runs at once. Runs that have ended do not count."""
    commands_max: int = 1024
    """Commands queued for one node; a node that reads slower loses its stream and joins again."""

    def __post_init__(self) -> None:
        for name in ("runs_max", "commands_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
