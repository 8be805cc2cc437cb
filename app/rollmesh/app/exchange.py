"""Give the finished rollouts of a run to a run of another mesh: one direction of an exchange between two meshes.

    ledger and payloads of a run folder on this host -> filter, text, rate -> SubmitSamples of the other mesh

Either mesh may go away: both sides are retried for `retry_s` since the last contact. Nothing is stored here. The key
of a group names the ledger and the group, so that a repeated submission, such as after a restart of this process, adds
nothing. Collaborator: `shared_rollouts`.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec

from rollmesh.app.interrupts import Interrupts, Stopped
from rollmesh.app.mesh_client import MeshAddress
from rollmesh.app.shared_rollouts import FinishedGroup, FinishedGroups, Selection, decoded_group, shared_task
from rollmesh.client import Client
from rollmesh.client.client import Run
from rollmesh.mesh.run_layout import RunLayout
from rollmesh.services.coordinator.fact_codec import decode_record
from rollmesh.shared.bus.bus import Bus, BusUnavailable, UnknownStream
from rollmesh.shared.bus.jetstream_bus import JetStreamBus
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.clock import Clock, SystemClock
from rollmesh.shared.domain.ledger_head import record_hash
from rollmesh.shared.errors import (
    InvalidInput,
    MeshError,
    PayloadTooLarge,
    RunEnded,
    SampleConflict,
    SampleQuota,
    UnknownRun,
)
from rollmesh.shared.net.retry import Backoff, RetryConfig, worth_retrying
from rollmesh.v1 import events_pb2, types_pb2

_NOT_YET = (UnknownRun, UnknownStream)
"""Errors of a mesh that has not created its run yet."""
_log = logging.getLogger(__name__)
POLL_S = 1.0
"""Pause between reads of the ledger."""
HASH_CHARS = 8
"""Characters of the hash of the first record in a key. They distinguish ledgers of runs with the same name."""

REJECTIONS_MAX = 8
"""Number of groups that the other mesh may reject in a row. Then none of them can be right."""


class ExchangeSummary(msgspec.Struct, kw_only=True):
    """The numbers of an exchange since this process began."""

    run: str = ""
    to_run: str = ""
    shared: int = 0
    """Groups that the other mesh has accepted, now or before."""
    filtered: int = 0
    """Groups that the selection excludes."""
    unreadable: int = 0
    """Groups whose payload was purged before it was read, or that are not one conversation."""
    rejected: int = 0
    """Groups that the other mesh has rejected."""
    retries: int = 0
    """Pauses because a mesh was away, or its quota was full."""
    ended: str = ""
    """Why the exchange ended: a run that ended, or an interrupt."""


@dataclass(kw_only=True)
class Exchange:
    """One direction of an exchange."""

    source: RunLayout
    run: str
    target: MeshAddress
    to_run: str
    selection: Selection
    mesh: str
    """Name of the giving mesh, for the provenance."""
    per_minute: float
    """Most groups per minute."""
    retry: RetryConfig
    on_change: Callable[[ExchangeSummary], None] = lambda summary: None
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        self.summary = ExchangeSummary(run=self.run, to_run=self.to_run)
        self._groups = FinishedGroups()
        self._ledger = ""
        self._next = 1
        """Ledger position of the next record."""
        self._pending: list[FinishedGroup] = []
        self._rejections = 0
        """Groups that were rejected since one was accepted."""
        self._free_at_s = 0.0
        self._progress_at_s = 0.0

    async def go(self) -> ExchangeSummary:
        """Exchange until a run ends or a signal asks to stop. Raises the MeshError that retries did not resolve."""
        with Interrupts() as interrupts:
            try:
                await interrupts.unless_stopped(self._forever())
            except Stopped:
                self.summary.ended = "interrupted"
        return self.summary

    async def _forever(self) -> None:
        access, backoff = self.target.access, Backoff(self.retry, self.clock)
        self._progress_at_s = self.clock.monotonic_s()
        async with Client(self.target.address, token=access.token, tls=access.tls, retry=self.retry) as client:
            to_run = client.run(self.to_run)
            while not self.summary.ended:
                before = self._progress_at_s
                try:
                    await self._session(to_run)
                except RunEnded as error:
                    self.summary.ended = f"the run {self.to_run} has ended: {error.message}"
                except MeshError as error:
                    if self._progress_at_s > before:
                        backoff.reset()
                    if isinstance(error, SampleQuota):  # the other mesh is there, and its queue is full
                        self._progress_at_s = self.clock.monotonic_s()
                    waits = worth_retrying(error) or isinstance(error, _NOT_YET)
                    if not waits or self._stands_s() > self.retry.retry_s:
                        raise
                    self.summary.retries += 1
                    _log.warning("exchange waits: run=%s error=%s", self.run, error.message)
                    await backoff.pause()

    def _stands_s(self) -> float:
        return self.clock.monotonic_s() - self._progress_at_s

    async def _session(self, to_run: Run) -> None:
        """Read and give with one connection to the bus, until the run ends."""
        async with _bus_of(self.source) as bus:
            streams = run_streams(self.run)
            ledger, payloads = await bus.open(streams.ledger.name), await bus.open(streams.samples.name)

            async def give_pending() -> None:
                while self._pending:
                    await self._give(to_run, lambda key: decoded_group(payloads, self._pending[0], key))
                    self._pending.pop(0)

            await give_pending()
            while True:
                async for record in ledger.read_range(self._next):
                    if record.seq == 1:
                        self._ledger = record_hash(record.payload)[:HASH_CHARS]
                    self._pending += self._groups.enter(decode_record(record.payload).facts)
                    self._next = record.seq + 1
                    await give_pending()
                self._progress_at_s = self.clock.monotonic_s()
                if self._groups.ended:
                    self.summary.ended = f"the run {self.run} has ended: {self._groups.ended}"
                    return
                await self.clock.sleep(POLL_S)

    async def _give(self, to_run: Run, read: Callable[[str], Awaitable[list[types_pb2.Episode] | None]]) -> None:
        """Give the first pending group, unless it is excluded. Raises MeshError if it is to be repeated."""
        group, summary = self._pending[0], self.summary
        if not self.selection.admits(group, self._groups.success_reward):
            summary.filtered += 1
            return
        episodes = await read(f"{self.run}.{self._ledger}/{group.group}")
        if episodes is None:
            summary.unreadable += 1
            return
        await self.clock.sleep(max(0.0, self._free_at_s - self.clock.monotonic_s()))
        self._free_at_s = self.clock.monotonic_s() + 60.0 / self.per_minute
        task, key = shared_task(group)
        origin = events_pb2.Provenance(mesh=self.mesh, run=self.run, step=self._groups.step)
        try:
            await to_run.submit_samples(
                episodes,
                [task],
                source=types_pb2.SEGMENT_SOURCE_PEER,
                answer_keys=[key] if key is not None else [],
                provenance=origin,
            )
        except SampleConflict:  # given before, by a release or with a selection that wrote it otherwise
            pass
        except (InvalidInput, PayloadTooLarge, SampleQuota) as error:
            self._rejections += 1
            if not _is_of_group(error) or self._rejections >= REJECTIONS_MAX:
                raise
            summary.rejected += 1
            _log.warning("group rejected: run=%s group=%s error=%s", self.run, group.group, error.message)
            return
        self._rejections = 0
        summary.shared += 1
        self._progress_at_s = self.clock.monotonic_s()
        self.on_change(summary)


def _is_of_group(error: MeshError) -> bool:
    """Return whether another group may be accepted: a quota must be one that this group alone exceeds."""
    return not isinstance(error, SampleQuota) or "groups_per_call" in error.metadata


@asynccontextmanager
async def _bus_of(layout: RunLayout) -> AsyncIterator[Bus]:
    """Connect to the bus of a run that is running. Its server is never started here, so that the mesh can start it.
    Raises BusUnavailable."""
    url = layout.config.bus.url or layout.bus_server().known_url()
    if not url:
        raise BusUnavailable(f"the mesh in {layout.run_dir} has not started its bus yet; start it, or wait")
    bus = layout.with_payloads(await JetStreamBus.connect(url, login=layout.bus_login()))
    try:
        yield bus
    finally:
        await bus.close()
