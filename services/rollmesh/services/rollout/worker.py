"""Lease episodes, run many concurrently, report them, and release the leases of unfinished ones.

  loop      consumes            produces           waits for                  unblocked by
  acquire   free slots          leases             a slot; work               a reported episode; admission
  episode   a lease             a report           slots of its stages        other episodes (see stages)
  renew     held leases         gone leases        a third of a term          the clock
  report    finished episodes   acknowledgements   the coordinator            its response, or give_up_s

A lease is held from the response that grants it until its report is acknowledged, or until it is released or gone.
`episodes_max` bounds the number of leases. Every exit of an episode passes through `_hold`, so that leased = completed
+ failed + cancelled + lost + running.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from rollmesh.services.rollout.config import WorkerConfig
from rollmesh.services.rollout.episode import EpisodeRunner, Report, cancelled_report
from rollmesh.services.rollout.episode_trace import SERVICE, episode_trace
from rollmesh.services.rollout.failures import worth_retrying
from rollmesh.services.rollout.ports import Coordinator
from rollmesh.services.rollout.progress import WorkerProgress
from rollmesh.services.rollout.renewer import Renewer
from rollmesh.services.rollout.reporter import Reporter
from rollmesh.shared.clock import Clock, time_limit
from rollmesh.shared.errors import Draining, MeshError, UnknownNode
from rollmesh.shared.net.retry import Backoff
from rollmesh.shared.telemetry import log_context, tracing
from rollmesh.v1 import coordinator_pb2


@dataclass(slots=True, eq=False)
class _Held:
    """A lease that this worker holds."""

    message: coordinator_pb2.EpisodeLease
    task: asyncio.Task[None] | None = None
    report: Report | None = None
    """Set when the episode has ended and only its acknowledgement is missing."""
    gone: bool = False


class RolloutWorker:
    """Run episodes until drained or cancelled."""

    def __init__(
        self,
        coordinator: Coordinator,
        runner: EpisodeRunner,
        progress: WorkerProgress,
        config: WorkerConfig,
        clock: Clock,
    ) -> None:
        self._coordinator = coordinator
        self._runner = runner
        self._progress = progress
        self._config = config
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._releases: list[Report] = []
        self._changed = asyncio.Event()
        self._acquiring: asyncio.Task[None] | None = None
        self._reporter = Reporter(coordinator, config, clock)
        self._renewer = Renewer(coordinator, config, clock, self._held.keys, self._lose)
        self._waiting_for = "the first response of the coordinator"

    @property
    def num_running(self) -> int:
        """Number of leases held."""
        return len(self._held)

    @property
    def waiting_for(self) -> str:
        """A description of the current wait; empty while every slot has work or no error occurs."""
        return self._renewer.last_error or self._waiting_for

    async def run(self) -> None:
        """Run until drained. On exit or cancellation, cancel the episodes and release their leases within
        `drain_s_max`."""
        self._acquiring = asyncio.ensure_future(self._acquire_forever())
        try:
            await asyncio.wait([self._acquiring])  # not awaited directly, because draining cancels it
            if not self._acquiring.cancelled():
                self._acquiring.result()
            await self._finish_held()
        finally:
            await self._stop()

    async def _finish_held(self) -> None:
        """Wait until the held episodes finish, at most `finish_s_max`. `_stop` releases the remaining ones."""
        try:
            async with time_limit(self._clock, self._config.finish_s_max):
                while self._held:
                    await self._change()
        except TimeoutError:
            self._waiting_for = f"release of {len(self._held)} episodes that exceeded finish_s_max"

    def drain(self) -> None:
        """Stop acquiring. `run` returns when the held episodes have finished or were released after `finish_s_max`."""
        if self._acquiring is not None:
            self._acquiring.cancel()

    def cancel(self, lease_ids: Iterable[str]) -> None:
        """Cancel episodes whose leases are already gone."""
        for lease_id in lease_ids:
            self._lose(lease_id)

    # Acquiring --------------------------------------------------------------------------------------------------------

    async def _acquire_forever(self) -> None:
        """Acquire leases until the coordinator reports that this node is draining."""
        backoff = Backoff(self._config, self._clock)
        while True:
            free = await self._free_slots()
            asked_ns = tracing.now_ns()
            try:
                answer = await self._coordinator.acquire(free, self._config.acquire_wait_s)
            except MeshError as err:
                if err.reason == Draining.reason:
                    return
                if not worth_retrying(err):
                    raise
                joining = err.reason == UnknownNode.reason
                self._waiting_for = "the coordinator to accept the node" if joining else f"coordinator: {err}"
                await backoff.pause()
                continue
            self._waiting_for = answer.waiting_for
            for message in answer.leases:
                self._take(message, asked_ns)
            if answer.leases:
                backoff.reset()
            else:
                await backoff.pause()  # avoids a tight loop when the coordinator responds immediately

    async def _free_slots(self) -> int:
        while len(self._held) >= self._config.episodes_max:
            self._waiting_for = ""
            await self._change()
        return self._config.episodes_max - len(self._held)

    def _take(self, message: coordinator_pb2.EpisodeLease, asked_ns: int) -> None:
        if message.lease_id in self._held:
            return
        self._progress.num_leased += 1
        held = _Held(message)
        self._held[message.lease_id] = held
        held.task = asyncio.ensure_future(self._hold(held, asked_ns))
        self._renewer.watch(message.lease_s)

    # Holding ----------------------------------------------------------------------------------------------------------

    async def _hold(self, held: _Held, asked_ns: int) -> None:
        lease = held.message
        try:
            with (
                log_context(run=lease.key.run, episode=lease.key.episode, lease=lease.lease_id),
                episode_trace(lease, asked_ns),
            ):
                held.report = await self._runner.run(lease)
                with tracing.span("report", SERVICE):
                    refusal = await self._reporter.report(held.report)
            self._count(held.report.outcome, lost=bool(refusal))
        except MeshError:
            self._progress.num_lost += 1  # the report failed: the lease expires, and another worker runs the episode
        except asyncio.CancelledError:
            self._release(held)
            raise
        finally:
            del self._held[lease.lease_id]
            self._changed.set()

    def _count(self, outcome: int, *, lost: bool) -> None:
        if lost:
            self._progress.num_lost += 1
        elif outcome == coordinator_pb2.EPISODE_OUTCOME_COMPLETED:
            self._progress.num_completed += 1
        else:
            self._progress.num_failed += 1

    def _release(self, held: _Held) -> None:
        if held.gone:
            self._progress.num_lost += 1
            return
        report = held.report
        if report is None:
            self._progress.num_cancelled += 1
            report = cancelled_report(held.message, "the worker is stopping")
        else:
            self._count(report.outcome, lost=False)
        self._releases.append(report)

    def _lose(self, lease_id: str) -> None:
        """Cancel an episode unless it has finished, because the lease of a recorded report is gone as well."""
        held = self._held.get(lease_id)
        if held is not None and held.task is not None and held.report is None:
            held.gone = True
            held.task.cancel()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    # Stopping ---------------------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        tasks = [held.task for held in self._held.values() if held.task is not None]
        if self._acquiring is not None:
            tasks.append(self._acquiring)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._config.drain_s_max)
        await self._renewer.close()
        await self._reporter.close()
        await self._send_releases()

    async def _send_releases(self) -> None:
        """Send the releases once, without a retry, because an unreleased lease expires."""
        reports, self._releases = self._releases, []
        if not reports:
            return
        try:
            async with time_limit(self._clock, self._config.drain_s_max):
                await self._coordinator.report(reports)
        except (MeshError, TimeoutError) as err:
            self._waiting_for = f"cannot release {len(reports)} leases: {err}"
