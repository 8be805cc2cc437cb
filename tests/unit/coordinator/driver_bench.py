"""A driver for tests: over the memory bus with delayed acknowledgements, a clock that the test moves, and services that
fail on demand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec

from rollmesh.services.coordinator.config import RunLimits
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.apply import apply
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.decision_context import CancelEpisodes
from rollmesh.services.coordinator.core.state import State
from rollmesh.services.coordinator.driver import RunDriver
from rollmesh.services.coordinator.effects import Effects
from rollmesh.services.coordinator.ledger import Ledger, read_ledger
from rollmesh.services.coordinator.recovery import Recovered
from rollmesh.shared.bus.bus import StreamLog, StreamSpec
from rollmesh.shared.bus.run_streams import StreamLimits, run_streams
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.domain.ids import SeededIds
from rollmesh.shared.domain.ledger_head import EMPTY
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import MeshError, OutOfRange, Unavailable
from rollmesh.testing.memory_bus import MemoryBus
from rollmesh.v1 import data_pb2, reward_pb2, types_pb2
from tests.sim.world import endless_spec

NAMES: dict[str, Any] = {"policy": "main", "learner": "main"}
SPEC = endless_spec(max_staleness=1, batch_groups=1, group_size=2, episode_lease_s=10.0)
LIMITS = RunLimits(tick_s=0.1, backoff_s=1.0, backoff_s_max=4.0)


class GatedLog:
    """A stream of the memory bus whose acknowledgements the test delays."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.held: list[tuple[asyncio.Future[int], asyncio.Future[int]]] = []
        self.holding = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def spec(self) -> StreamSpec:
        spec: StreamSpec = self._inner.spec
        return spec

    @spec.setter
    def spec(self, spec: StreamSpec) -> None:
        self._inner.spec = spec

    async def append_pipelined(self, payload: bytes, **kwargs: Any) -> asyncio.Future[int]:
        stored: asyncio.Future[int] = await self._inner.append_pipelined(payload, **kwargs)
        if not self.holding:
            return stored
        seen: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.held.append((seen, stored))
        return seen

    def release(self) -> None:
        self.holding = False
        for seen, stored in self.held:
            seen.set_result(stored.result())
        self.held = []


class Services:
    """Data and reward services that fail a given number of times and then succeed."""

    def __init__(self) -> None:
        self.draws_failing = 0
        self.draws_empty = 0
        self.draws_max = 10**9
        """Number of tasks at which the source ends."""
        self.page_max = 10**9
        """Most tasks in a response."""
        self.text = ""
        """Text of every task."""
        self.decisions_failing = 0
        self.asked: list[str] = []
        self.finalized: list[reward_pb2.FinalizeGroupRequest] = []
        self.cancelled: list[CancelEpisodes] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def next_tasks(self, request: data_pb2.NextTasksRequest) -> data_pb2.NextTasksResponse:
        self.asked.append(f"draw {request.first_draw}+{request.num}")
        await self.hold.wait()
        if self.draws_failing > 0:
            self.draws_failing -= 1
            raise Unavailable("the data service is away")
        if self.draws_empty > 0:
            self.draws_empty -= 1
            return data_pb2.NextTasksResponse()
        if request.first_draw >= self.draws_max:
            raise OutOfRange(f"draw {request.first_draw} is beyond the end")
        last = min(request.first_draw + min(request.num, self.page_max), self.draws_max)
        messages = [types_pb2.Message(role="user", content=self.text)] if self.text else []
        tasks = [
            data_pb2.DrawnTask(
                draw=draw, task=types_pb2.Task(task_id=f"t{draw}", labels={"level": str(draw)}, messages=messages)
            )
            for draw in range(request.first_draw, last)
        ]
        return data_pb2.NextTasksResponse(tasks=tasks)

    async def finalize_group(self, request: reward_pb2.FinalizeGroupRequest) -> reward_pb2.FinalizeGroupResponse:
        self.asked.append(f"finalize {request.group.group}")
        self.finalized.append(request)
        await self.hold.wait()
        if self.decisions_failing > 0:
            self.decisions_failing -= 1
            raise Unavailable("the reward service is away")
        return reward_pb2.FinalizeGroupResponse(decision=reward_pb2.GROUP_DECISION_KEEP)

    def cancel_episodes(self, run: str, command: CancelEpisodes) -> None:
        self.cancelled.append(command)


class Bench:
    """A driver over the memory bus and a clock that the test moves."""

    def __init__(self, log: GatedLog, dead: StreamLog, limits: RunLimits) -> None:
        self.clock = ManualClock()
        self.log = log
        self.core = Core()
        self.services = Services()
        self.failures: list[MeshError] = []
        self.lost: list[str] = []
        self.room_bytes = 1 << 20
        """Bytes that a run which ends gets in its ledger."""
        self.ids = SeededIds(1)
        ledger = Ledger(log, ids=self.ids, clock=self.clock, append_s_max=5.0)
        self.driver = RunDriver(
            "r",
            self.core,
            ledger,
            lambda inbox: Effects(self.core, inbox, self.services, dead, clock=self.clock, ids=self.ids, limits=limits),
            clock=self.clock,
            limits=limits,
            restore=self._restore,
            on_failure=lambda run, error: self.failures.append(error),
            on_lost=lambda driver, error: self.lost.append(str(error)),
        )

    async def _restore(self, ends: bool) -> Recovered:
        state, head = State(), EMPTY
        async for record in read_ledger(self.log):
            for fact in record.facts:
                apply(state, fact)
            head = record.head
        if ends or state.ended:
            held = (await self.log.info()).num_bytes
            self.log.spec = replace(self.log.spec, bytes_max=max(self.log.spec.bytes_max, held + self.room_bytes))
        return Recovered(state=state, head=head, snapshot_position=0)

    async def ask(self, kind: Callable[..., Any], **fields: Any) -> Any:
        return await self.driver.submit(lambda ticket: kind(ticket=ticket, **fields))

    def asking(self, kind: Callable[..., Any], **fields: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self.ask(kind, **fields))

    async def begin(self, **changes: Any) -> None:
        await self.ask(m.CreateRun, spec=msgspec.structs.replace(SPEC, **changes))
        attached = await self.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
        version = PolicyVersion(policy="main", step=0, weights_digest="w")
        await self.ask(i.PublishVersion, **NAMES, trainer_epoch=attached.trainer_epoch, version=version)

    async def acquire(self, num: int = 2) -> i.Acquired:
        acquired: i.Acquired = await self.ask(i.AcquireRollouts, node_id="w", num_max=num, wait_s=100.0)
        return acquired

    async def fail_all(self, leases: tuple[i.EpisodeLease, ...], **changes: Any) -> m.ReportEpisodesResponse:
        reports = tuple(
            i.EpisodeReport(
                lease_id=lease.lease_id,
                group=lease.group,
                episode=lease.episode,
                attempt=lease.attempt,
                outcome=m.EpisodeOutcome.INFRA_FAILURE,
                **changes,
            )
            for lease in leases
        )
        reported: m.ReportEpisodesResponse = await self.ask(i.ReportEpisodes, node_id="w", reports=reports)
        return reported


@asynccontextmanager
async def bench(
    limits: RunLimits = LIMITS, *, payload_bytes_max: int = 1 << 20, ledger_bytes_max: int = 1 << 24
) -> AsyncIterator[Bench]:
    bus = MemoryBus(payload_bytes_max=payload_bytes_max)
    streams = run_streams("r", StreamLimits(ledger_bytes_max=ledger_bytes_max))
    made = Bench(GatedLog(await bus.create(streams.ledger)), await bus.create(streams.dead), limits)
    await made.driver.start()
    try:
        async with asyncio.timeout(20):
            yield made
    finally:
        await made.driver.close()


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)
