"""The driver's order: nothing is answered before it is stored, nothing overtakes, and what can't be stored ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from rollmesh.services.coordinator.config import RunLimits
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.records import PayloadRef, RunSpec, SampleMeta, StepSpan, Version
from rollmesh.services.coordinator.core.turn import CancelEpisodes
from rollmesh.services.coordinator.driver import RunDriver, without_purged
from rollmesh.services.coordinator.effects import Effects
from rollmesh.services.coordinator.ledger import Ledger
from rollmesh.shared.bus.bus import StreamLog
from rollmesh.shared.bus.memory_bus import MemoryBus
from rollmesh.shared.bus.run_streams import run_streams
from rollmesh.shared.clock import ManualClock
from rollmesh.shared.errors import DataLoss, Fenced, Internal, MeshError, NotReady, Overloaded, Unavailable
from rollmesh.shared.ids import SeededIds
from rollmesh.v1 import data_pb2, reward_pb2, types_pb2

NAMES: dict[str, Any] = {"policy": "main", "learner": "main"}
SPEC = RunSpec(run="r", max_staleness=1, batch_groups=1, group_size=2, episode_lease_s=10.0)
LIMITS = RunLimits(tick_s=0.1, backoff_s=1.0, backoff_s_max=4.0)


class GatedLog:
    """A stream of the memory bus whose acknowledgements the test holds back."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.held: list[tuple[asyncio.Future[int], asyncio.Future[int]]] = []
        self.holding = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

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
    """Data and reward services that fail as often as they are told to, then answer."""

    def __init__(self) -> None:
        self.draws_failing = 0
        self.draws_empty = 0
        self.decisions_failing = 0
        self.asked: list[str] = []
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
        draws = range(request.first_draw, request.first_draw + request.num)
        tasks = [data_pb2.DrawnTask(draw=draw, task=types_pb2.Task(task_id=f"t{draw}")) for draw in draws]
        return data_pb2.NextTasksResponse(tasks=tasks)

    async def finalize_group(self, request: reward_pb2.FinalizeGroupRequest) -> reward_pb2.FinalizeGroupResponse:
        self.asked.append(f"finalize {request.group.group}")
        await self.hold.wait()
        if self.decisions_failing > 0:
            self.decisions_failing -= 1
            raise Unavailable("the reward service is away")
        return reward_pb2.FinalizeGroupResponse(decision=reward_pb2.GROUP_DECISION_KEEP)

    def cancel_episodes(self, run: str, command: CancelEpisodes) -> None:
        self.cancelled.append(command)


class Bench:
    """A driver over the memory bus and a clock that stands still."""

    def __init__(self, log: GatedLog, dead: StreamLog, limits: RunLimits) -> None:
        self.clock = ManualClock()
        self.log = log
        self.core = Core()
        self.services = Services()
        self.failures: list[MeshError] = []
        self.ids = SeededIds(1)
        ledger = Ledger(log, position=0, record_id="", ids=self.ids, clock=self.clock, append_s_max=5.0)
        self.driver = RunDriver(
            "r",
            self.core,
            ledger,
            lambda inbox: Effects(self.core, inbox, self.services, dead, clock=self.clock, ids=self.ids, limits=limits),
            clock=self.clock,
            limits=limits,
            on_failure=lambda run, error: self.failures.append(error),
        )

    async def ask(self, kind: Callable[..., Any], **fields: Any) -> Any:
        return await self.driver.ask(lambda ticket: kind(ticket=ticket, **fields))

    def asking(self, kind: Callable[..., Any], **fields: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(self.ask(kind, **fields))

    async def begin(self) -> None:
        await self.ask(i.CreateRun, spec=SPEC)
        attached = await self.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
        version = Version(policy="main", weights_digest="w")
        await self.ask(i.PublishVersion, **NAMES, trainer_epoch=attached.trainer_epoch, version=version)

    async def acquire(self, num: int = 2) -> i.Acquired:
        acquired: i.Acquired = await self.ask(i.AcquireRollouts, node_id="w", num_max=num, wait_s=100.0)
        return acquired

    async def fail_all(self, leases: tuple[i.EpisodeLease, ...], **changes: Any) -> i.Reported:
        reports = tuple(
            i.EpisodeReport(
                lease_id=lease.lease_id,
                group=lease.group,
                episode=lease.episode,
                attempt=lease.attempt,
                outcome=i.EpisodeOutcome.INFRA_FAILURE,
                **changes,
            )
            for lease in leases
        )
        reported: i.Reported = await self.ask(i.ReportEpisodes, node_id="w", reports=reports)
        return reported


@asynccontextmanager
async def bench(limits: RunLimits = LIMITS) -> AsyncIterator[Bench]:
    bus = MemoryBus()
    streams = run_streams("r")
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


# Order ----------------------------------------------------------------------------------------------------------------


async def test_nothing_is_answered_before_it_is_stored() -> None:
    async with bench() as b:
        b.log.holding = True
        created = b.asking(i.CreateRun, spec=SPEC)
        await settle()
        assert b.core.state.spec == SPEC
        assert not created.done()
        b.log.release()
        assert await created is True


async def test_reads_and_refusals_wait_for_what_they_judged_by() -> None:
    async with bench() as b:
        await b.begin()
        b.log.holding = True
        attach = b.asking(i.AttachTrainer, **NAMES, last_update=0, digest="")
        fenced = b.asking(i.LeaseBatch, **NAMES, trainer_epoch=1, update=1)
        look = asyncio.create_task(b.driver.look(lambda core, position: (core.state.the_clock.trainer_epoch, position)))
        await settle()
        assert [task.done() for task in (attach, fenced, look)] == [False] * 3
        b.log.release()
        assert (await attach).trainer_epoch == 2
        with pytest.raises(Fenced):
            await fenced
        assert await look == (2, 4)


async def test_an_answer_names_the_position_at_which_it_became_true() -> None:
    async with bench() as b:
        _, created = await b.driver.ask_placed(lambda t: i.CreateRun(ticket=t, spec=SPEC))
        _, again = await b.driver.ask_placed(lambda t: i.CreateRun(ticket=t, spec=SPEC))
        _, attached = await b.driver.ask_placed(lambda t: i.AttachTrainer(ticket=t, **NAMES, last_update=0, digest=""))
        assert (created, again, attached) == (1, 1, 2)


async def test_calls_to_others_begin_only_when_their_reason_is_stored() -> None:
    async with bench() as b:
        await b.begin()
        acquired = b.asking(i.AcquireRollouts, node_id="w", num_max=2, wait_s=100.0)
        await settle()
        b.services.asked.clear()
        leases = (await acquired).leases
        b.log.holding = True
        samples = [b.asking(i.StopRun, reason="x")]
        await settle()
        assert not b.services.cancelled, "the cancelled episodes are not stored as such yet"
        b.log.release()
        await samples[0]
        assert {lease for one in b.services.cancelled for lease in one.lease_ids} == {x.lease_id for x in leases}


# Limits and cancellation ----------------------------------------------------------------------------------------------


async def test_a_full_queue_refuses_and_says_so() -> None:
    async with bench(msgspec.structs.replace(LIMITS, inputs_max=2, releases_max=1)) as b:
        await b.begin()
        b.log.holding = True
        asked = [b.asking(i.AttachTrainer, **NAMES, last_update=0, digest="") for _ in range(12)]
        await settle()
        refused = [task for task in asked if task.done()]
        assert refused
        for task in refused:
            assert isinstance(task.exception(), Overloaded)
        b.log.release()
        answered = [await task for task in asked if task not in refused]
        assert answered


async def test_whoever_is_cancelled_waits_no_longer() -> None:
    async with bench() as b:
        await b.begin()
        b.services.hold.clear()
        waiting = b.asking(i.AcquireRollouts, node_id="w", num_max=1, wait_s=100.0)
        await settle()
        assert len(b.core.volatile.workers) == 1
        waiting.cancel()
        await settle()
        assert not b.core.volatile.workers


async def test_leases_granted_to_nobody_go_back_without_costing_a_try() -> None:
    async with bench() as b:
        await b.begin()
        b.log.holding = True
        asked = b.asking(i.AcquireRollouts, node_id="w", num_max=2, wait_s=100.0)
        await settle()
        asked.cancel()  # after the decision, before it is stored
        await settle()
        b.log.release()
        await settle()
        again = await b.acquire()
        assert {lease.attempt for lease in again.leases} <= {1, 2}
        assert all(e.failures == 0 for g in b.core.state.groups.values() for e in g.episodes.values())


async def test_a_wait_ends_at_its_time() -> None:
    async with bench() as b:
        await b.ask(i.CreateRun, spec=SPEC)
        waiting = b.asking(i.AcquireRollouts, node_id="w", num_max=1, wait_s=3.0)
        await settle()
        await b.clock.run_for(2.9)
        assert not waiting.done()
        await b.clock.run_for(0.3)
        assert "published version" in (await waiting).waiting_for


async def test_a_watcher_gets_the_newest_state_at_most_once_per_interval() -> None:
    async with bench() as b:
        await b.begin()
        watch = b.driver.watch(lambda core, position: position)
        assert await anext(watch) == 3
        second = asyncio.ensure_future(anext(watch))
        for _ in range(5):
            await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
        await settle()
        assert not second.done(), "five changes, but the interval is not over"
        await b.clock.run_for(LIMITS.watch_interval_s)
        assert await second == 8
        idle = asyncio.ensure_future(anext(watch))
        await b.clock.run_for(LIMITS.watch_interval_s + LIMITS.watch_idle_s - 0.1)
        assert not idle.done()
        await b.clock.run_for(0.2)
        assert await idle == 8


# Failure --------------------------------------------------------------------------------------------------------------


async def test_a_foreign_record_in_the_ledger_ends_the_driver() -> None:
    async with bench() as b:
        await b.begin()
        await b.log.append(b"another's", msg_id="another")
        with pytest.raises(NotReady, match="try again at the one that leads it now"):
            await b.acquire()
        assert isinstance(b.failures[0], Fenced)
        with pytest.raises(NotReady):
            await b.ask(i.CreateRun, spec=SPEC)


async def test_a_ledger_that_takes_nothing_ends_the_driver() -> None:
    async with bench() as b:
        await b.begin()
        b.log.close()
        with pytest.raises(NotReady):
            await b.acquire()
        assert isinstance(b.failures[0], DataLoss)
        assert "recovers from what is stored" in str(b.failures[0])


async def test_a_bug_in_the_core_ends_the_driver(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as b:
        await b.begin()
        b.core.state.groups = None  # type: ignore[assignment]
        with pytest.raises(NotReady):
            await b.acquire()
        assert isinstance(b.failures[0], Internal)
        assert len([r for r in caplog.records if r.exc_info]) == 1


async def test_closing_tells_everybody_to_try_again() -> None:
    async with bench() as b:
        await b.begin()
        b.services.hold.clear()
        waiting = b.asking(i.AcquireRollouts, node_id="w", num_max=1, wait_s=100.0)
        watch = b.driver.watch(lambda core, position: position)
        await anext(watch)
        watching = asyncio.ensure_future(anext(watch))
        await settle()
        await b.driver.close()
        await b.clock.run_for(LIMITS.watch_interval_s)
        for task in (waiting, watching):
            with pytest.raises(NotReady, match="is stopping; try again"):
                await task


# Calls to others ------------------------------------------------------------------------------------------------------


async def test_a_data_service_that_is_away_is_asked_again_with_growing_pauses() -> None:
    async with bench() as b:
        await b.begin()
        b.services.draws_failing = 3
        acquired = b.asking(i.AcquireRollouts, node_id="w", num_max=2, wait_s=100.0)
        await settle()
        for pause_s, num_asked in ((1.0, 2), (2.0, 3), (4.0, 4)):
            await b.clock.run_for(pause_s - 0.5)
            assert len(b.services.asked) == num_asked - 1
            await b.clock.run_for(0.5)
            assert len(b.services.asked) == num_asked
        assert len((await acquired).leases) == 2
        assert set(b.services.asked) == {"draw 0+1"}


async def test_an_empty_answer_is_no_hot_loop() -> None:
    async with bench() as b:
        await b.begin()
        b.services.draws_empty = 2
        acquired = b.asking(i.AcquireRollouts, node_id="w", num_max=2, wait_s=100.0)
        await settle()
        assert len(b.services.asked) == 1
        await b.clock.run_for(1.1)
        assert len(b.services.asked) == 2
        await b.clock.run_for(2.1)
        assert (await acquired).leases


async def test_a_reward_service_that_is_away_never_decides_by_its_absence() -> None:
    async with bench() as b:
        await b.begin()
        b.services.decisions_failing = 4
        await _score_all(b, (await b.acquire()).leases)
        assert [g.phase.name for g in b.core.state.groups.values()] == ["FINALIZING"]
        await b.clock.run_for(1.0 + 2.0 + 4.0 + 4.0 + 0.1)
        assert [g.phase.name for g in b.core.state.groups.values()] == ["READY"]
        assert b.services.asked.count("finalize g0") == 5


async def test_a_group_that_vanished_settles_its_question() -> None:
    async with bench() as b:
        await b.begin()
        b.services.decisions_failing = 1
        await _score_all(b, (await b.acquire()).leases)
        await settle()
        await b.ask(i.StopRun, reason="x")
        await b.clock.run_for(1.1)
        await settle()
        assert not b.core.volatile.finalizing
        assert b.services.asked.count("finalize g0") == 1


async def _score_all(b: Bench, leases: tuple[i.EpisodeLease, ...]) -> None:
    for lease in leases:
        meta = SampleMeta(sample_id=f"{lease.episode}.0", policy="main", steps=(StepSpan(num_tokens=1),), num_tokens=1)
        report = i.EpisodeReport(
            lease_id=lease.lease_id,
            group=lease.group,
            episode=lease.episode,
            attempt=lease.attempt,
            outcome=i.EpisodeOutcome.COMPLETED,
            samples=(meta,),
        )
        await b.ask(i.ReportEpisodes, node_id="w", reports=(report,))


def test_only_reports_of_purged_payloads_are_refused() -> None:
    reports = tuple(
        i.EpisodeReport(
            lease_id="l",
            group="g",
            episode="e",
            attempt=1,
            outcome=i.EpisodeOutcome.COMPLETED,
            payload=PayloadRef(sequence=sequence),
        )
        for sequence in (0, 4, 5)
    )
    request = i.ReportEpisodes(ticket=1, node_id="w", reports=reports)
    assert [r.attempt for r in without_purged(request, 5).reports] == [1, -1, 1]
    assert without_purged(request, 0) is request
