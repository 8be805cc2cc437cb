"""Configuration of the coordinator."""

from __future__ import annotations

import msgspec

from rollmesh.services.coordinator.core.fleet import FleetConfig
from rollmesh.shared.bus.run_streams import StreamLimits
from rollmesh.shared.rpc.server import ServerConfig
from rollmesh.shared.settings import PositiveFloat, PositiveInt, Settings


class RunLimits(Settings):
    """Limits of one run's driver."""

    inputs_max: PositiveInt = 8192
    """Questions waiting for a decision; more are refused with OVERLOADED."""
    releases_max: PositiveInt = 2048
    """Decisions waiting to be stored; then deciding waits."""
    tick_s: PositiveFloat = 0.1
    """How late a deadline may be noticed."""
    append_s_max: PositiveFloat = 120.0
    """How long the ledger may be out of reach before the coordinator stops; a restart of NATS must fit."""
    watch_interval_s: PositiveFloat = 0.25
    """Shortest time between two states sent to one watcher."""
    watch_idle_s: PositiveFloat = 5.0
    """Longest time between them: who waits for what changes without a fact."""
    snapshot_records: PositiveInt = 2000
    """Ledger records between snapshots; recovery replays at most about as many."""
    housekeeping_s: PositiveFloat = 2.0
    """Seconds between looks at what can be snapshotted and purged."""
    ended_idle_s: PositiveFloat = 5.0
    """Seconds without a request after which a run that has ended is not led any longer; the next request recovers it."""
    calls_max: PositiveInt = 64
    """Calls to the reward service under way at once."""
    finalize_tries_max: PositiveInt = 10
    """Calls for one group that the reward service fails, before the group ends as failed(NOT_FINALIZED)."""
    call_s: PositiveFloat = 30.0
    """Deadline of one call to another service."""
    backoff_s: PositiveFloat = 0.05
    """First pause after a failed call; doubles up to `backoff_s_max`."""
    backoff_s_max: PositiveFloat = 2.0
    """Longest pause between tries."""


class CoordinatorConfig(Settings):
    """Settings of a coordinator."""

    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    """Where it listens."""
    fleet: FleetConfig = msgspec.field(default_factory=FleetConfig)
    """Silence and weight commands."""
    run: RunLimits = msgspec.field(default_factory=RunLimits)
    """Limits per run."""
    streams: StreamLimits = msgspec.field(default_factory=StreamLimits)
    """Disk per stream of a live run; an ended run keeps what it holds and a little room."""
    runs_max: PositiveInt = 64
    """Live runs at once. Runs that have ended do not count."""
    commands_max: PositiveInt = 1024
    """Commands queued for one node; a node that reads slower loses its stream and joins again."""
