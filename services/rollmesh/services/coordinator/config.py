"""Configuration of the coordinator."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rollmesh.services.coordinator.core.fleet import FleetConfig
from rollmesh.services.coordinator.validation import SUBMIT_BYTES_MAX
from rollmesh.shared.bus.run_streams import StreamLimits
from rollmesh.shared.config.settings import PositiveFloat, PositiveInt, Settings, Share
from rollmesh.shared.rpc.addresses import host_of, is_ip_address, port_of
from rollmesh.shared.rpc.server import ServerConfig


class SubmissionConfig(Settings):
    """Quotas of the tasks that clients submit to a run (SubmitTasks)."""

    task_bytes_max: Annotated[int, Meta(ge=1, le=SUBMIT_BYTES_MAX)] = 1024 * 1024
    """Maximum size of a task with its answer key, in bytes. All tasks of a call have at most 2 MiB."""
    open_max: PositiveInt = 10_000
    """Maximum number of tasks of a run that wait for admission. More are rejected with TASK_QUOTA."""
    open_bytes_max: PositiveInt = 32 * 1024 * 1024
    """Maximum size of these tasks with their answer keys, in bytes. The coordinator holds the tasks in memory and in
    its snapshots. Tasks and keys together fill at most 80% of the run's ledger (`coordinator.streams`)."""
    tasks_max: PositiveInt = 200_000
    """Maximum number of tasks that a run gets in total. The coordinator holds the id of each, 150 to 400 bytes."""


class SamplesConfig(Settings):
    """Quotas of the finished samples that clients submit to a run (SubmitSamples)."""

    waiting_max: PositiveInt = 4096
    """Maximum number of groups of a run that wait for admission. More are rejected with SAMPLE_QUOTA."""
    waiting_bytes_max: PositiveInt = 32 * 1024 * 1024
    """Maximum size of these groups, in bytes. The coordinator holds them in memory and in its snapshots."""
    groups_max: PositiveInt = 200_000
    """Maximum number of groups that a run gets in total. The coordinator holds the key of each."""


class RunLimits(Settings):
    """Limits of one run's driver."""

    inputs_max: PositiveInt = 8192
    """Maximum number of requests that wait for a decision. More are rejected with OVERLOADED."""
    releases_max: PositiveInt = 2048
    """Maximum number of decisions that wait to be stored. At the limit, the driver makes no further decision."""
    tick_s: PositiveFloat = 0.1
    """Maximum delay in noticing a deadline, in seconds."""
    append_s_max: PositiveFloat = 120.0
    """Time for which the ledger may be unreachable before the coordinator stops, in seconds. It must cover a restart of
    NATS."""
    watch_interval_s: PositiveFloat = 0.25
    """Minimum time between two states for one watcher, in seconds. All watchers of a run together get at most 250
    states per second, so that this time grows beyond 62 watchers."""
    watch_idle_s: PositiveFloat = 5.0
    """Maximum time between two states for one watcher, in seconds, because waits change without a fact."""
    snapshot_records: PositiveInt = 2000
    """Number of ledger records between snapshots. Recovery replays at most about as many."""
    housekeeping_s: PositiveFloat = 2.0
    """Time between two runs of housekeeping, in seconds."""
    retain_share: Share = 0.0
    """Share of the groups whose payloads are kept after they are trained or dropped, for `rollmesh export`. It needs
    payloads in files (`bus.payloads`). 0: payloads are purged."""
    retained_bytes_max: PositiveInt = 16 * 1024**3
    """Disk for kept payloads. The oldest ones are removed beyond it."""
    ended_idle_s: PositiveFloat = 5.0
    """Time without a request after which the coordinator stops leading a run that has ended, in seconds. The next
    request recovers the run."""
    calls_max: PositiveInt = 64
    """Maximum number of concurrent calls to the reward service."""
    finalize_tries_max: PositiveInt = 10
    """Number of failed calls to the reward service after which a group ends as failed(NOT_FINALIZED). A call that does
    not reach the service does not count, and one whose connection is lost does."""
    call_s: PositiveFloat = 30.0
    """Timeout of one call to another service, in seconds."""
    backoff_s: PositiveFloat = 0.05
    """First back-off after a failed call, in seconds. It doubles up to `backoff_s_max`."""
    backoff_s_max: PositiveFloat = 2.0
    """Maximum back-off between two calls, in seconds."""
    submitted: SubmissionConfig = SubmissionConfig()
    """Quotas of submitted tasks."""
    samples: SamplesConfig = SamplesConfig()
    """Quotas of submitted samples."""


class ArchiveConfig(Settings):
    """When the oldest records of a run's ledger move from its stream to archive segments, which are compressed files of
    the run folder."""

    store: Literal["auto", "files", "off"] = "auto"
    """`auto`: archive if all nodes are on one host: with the embedded NATS server and loopback addresses. `files`:
    always archive; the processes that read ledgers (coordinator, data service, gateway, commands on the run) must then
    have the run folder. `off`: archive no further records."""
    from_share: Annotated[float, Meta(gt=0, le=0.8)] = 0.25
    """Share of `coordinator.streams.ledger_bytes_max` above which the oldest records of the stream are archived."""
    segment_bytes: PositiveInt = 16 * 1024 * 1024
    """Size of the records of a segment before compression, in bytes; at most half of what `from_share` permits."""


class CoordinatorConfig(Settings):
    """Settings of a coordinator."""

    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    """Address of the server."""
    standby: tuple[str, ...] = ()
    """Further addresses, IP:PORT, at which this coordinator may be started if its host is lost. Nodes try them when
    they lose it. Not needed if `server.advertise` is a name that then resolves to the new host."""
    fleet: FleetConfig = msgspec.field(default_factory=FleetConfig)
    """Heartbeats and weight commands."""
    run: RunLimits = msgspec.field(default_factory=RunLimits)
    """Limits per run."""
    streams: StreamLimits = msgspec.field(default_factory=StreamLimits)
    """Disk per stream of a live run. A run that has ended keeps what its streams contain and a small reserve."""
    archive: ArchiveConfig = ArchiveConfig()
    """Archive of old ledger records."""
    runs_max: PositiveInt = 64
    """Maximum number of live runs. Runs that have ended do not count."""
    commands_max: PositiveInt = 1024
    """Maximum number of queued commands for one node. A node that does not drain its queue is disconnected, and joins
    again."""

    def check_fields(self) -> None:
        for address in self.standby:
            if not is_ip_address(host_of(address)) or not 0 < port_of(address) < 65536:
                raise ValueError(f"`standby` must list IP:PORT, got {address!r}; a name needs no list")
