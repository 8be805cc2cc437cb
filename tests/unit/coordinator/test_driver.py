"""The driver's order: no reply precedes its record, no reply overtakes another, and a failed append ends the driver."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from rollmesh.services.coordinator.callers import STATES_PER_S
from rollmesh.services.coordinator.core import core as core_module
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.decision_context import DecisionContext
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.errors import (
    DataLoss,
    Fenced,
    Internal,
    LedgerFull,
    NotReady,
    Overloaded,
    PayloadTooLarge,
    RunEnded,
)

from .driver_bench import LIMITS, NAMES, SPEC, Bench, bench, settle

# Order ----------------------------------------------------------------------------------------------------------------


async def test_nothing_is_answered_before_it_is_stored() -> None:
    async with bench() as b:
        b.log.holding = True
        created = b.asking(m.CreateRun, spec=SPEC)
        await settle()
        assert b.core.state.spec == SPEC
        assert not created.done()
        b.log.release()
        assert (await created).created


async def test_reads_and_refusals_wait_for_what_they_judged_by() -> None:
    async with bench() as b:
        await b.begin()
        b.log.holding = True
        attach = b.asking(i.AttachTrainer, **NAMES, last_update=0, digest="")
        fenced = b.asking(i.LeaseBatch, **NAMES, trainer_epoch=1, update=1)
        look = asyncio.create_task(
            b.driver.read(lambda core, head: (core.state.the_clock.trainer_epoch, head.position))
        )
        await settle()
        assert [task.done() for task in (attach, fenced, look)] == [False] * 3
        b.log.release()
        assert (await attach).trainer_epoch == 2
        with pytest.raises(Fenced):
            await fenced
        assert await look == (2, 4)


async def test_an_answer_names_the_position_at_which_it_became_true() -> None:
    async with bench() as b:
        _, created = await b.driver.submit_with_head(lambda t: m.CreateRun(ticket=t, spec=SPEC))
        _, again = await b.driver.submit_with_head(lambda t: m.CreateRun(ticket=t, spec=SPEC))
        _, attached = await b.driver.submit_with_head(
            lambda t: i.AttachTrainer(ticket=t, **NAMES, last_update=0, digest="")
        )
        assert created == again
        assert (created.position, attached.position) == (1, 2)
        assert created.hash != attached.hash


async def test_leases_that_come_together_with_a_cancellation_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker never gets the leases. They must not wait for their expiry and count as an attempt."""
    async with bench() as b:
        await b.begin()
        acquiring = b.asking(i.AcquireRollouts, node_id="w", num_max=2, wait_s=100.0)
        answer = b.driver._answer

        def answer_and_cancel(ticket: int, value: object, at: Any) -> None:
            answer(ticket, value, at)
            if isinstance(value, i.Acquired):
                acquiring.cancel()

        monkeypatch.setattr(b.driver, "_answer", answer_and_cancel)
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        monkeypatch.undo()
        await settle()
        again = await b.ask(i.AcquireRollouts, node_id="w", num_max=2, wait_s=100.0)
        assert [lease.attempt for lease in again.leases] == [2, 2]
        assert all(e.failures == 0 for g in b.core.state.groups.values() for e in g.episodes.values())


async def test_a_record_that_is_too_large_rejects_its_request_and_nothing_else() -> None:
    async with bench(payload_bytes_max=4_000) as b:
        await b.begin()
        leases = (await b.acquire()).leases
        with pytest.raises(PayloadTooLarge):
            await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="", holder="x" * 5_000)
        assert b.failures == []
        assert b.core.state.the_clock.trainer_epoch == 1
        assert (await b.fail_all(leases)).results == ("", "")
        assert (await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")).trainer_epoch == 2


async def test_callers_that_waited_when_a_record_was_too_large_retry() -> None:
    async with bench(payload_bytes_max=4_000) as b:
        await b.begin()
        waiting = b.asking(i.LeaseBatch, **NAMES, trainer_epoch=1, update=1, wait_s=50.0)
        await settle()
        with pytest.raises(PayloadTooLarge):
            await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="", holder="x" * 5_000)
        with pytest.raises(NotReady):
            await waiting
        assert b.failures == []


async def test_calls_to_others_begin_only_when_their_reason_is_stored() -> None:
    async with bench() as b:
        await b.begin()
        acquired = b.asking(i.AcquireRollouts, node_id="w", num_max=2, wait_s=100.0)
        await settle()
        b.services.asked.clear()
        leases = (await acquired).leases
        b.log.holding = True
        samples = [b.asking(m.StopRun, reason="x")]
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


async def test_a_cancelled_caller_waits_no_longer() -> None:
    async with bench() as b:
        await b.begin()
        b.services.hold.clear()
        waiting = b.asking(i.AcquireRollouts, node_id="w", num_max=1, wait_s=100.0)
        await settle()
        assert len(b.core.ephemeral.workers) == 1
        waiting.cancel()
        await settle()
        assert not b.core.ephemeral.workers


async def test_leases_without_a_receiver_are_returned_without_counting_an_attempt() -> None:
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
        await b.ask(m.CreateRun, spec=SPEC)
        waiting = b.asking(i.AcquireRollouts, node_id="w", num_max=1, wait_s=3.0)
        await settle()
        await b.clock.run_for(2.9)
        assert not waiting.done()
        await b.clock.run_for(0.3)
        assert "published version" in (await waiting).waiting_for


async def test_a_watcher_gets_the_newest_state_at_most_once_per_interval() -> None:
    async with bench() as b:
        await b.begin()
        watch = b.driver.watch(lambda core, head: head.position)
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


class Watchers:
    """Watchers that share their reads, each with the states that it got."""

    def __init__(self, b: Bench, num: int) -> None:
        self.num_reads = 0
        self.states: list[list[tuple[int, str]]] = [[] for _ in range(num)]
        self.tasks = [asyncio.create_task(self._watch(b, states)) for states in self.states]

    async def _watch(self, b: Bench, states: list[tuple[int, str]]) -> None:
        def read(core: Core, head: LedgerHead) -> tuple[int, str]:
            self.num_reads += 1
            return head.position, core.state.ended

        async for state in b.driver.watch(read, is_shared=True):
            states.append(state)

    @property
    def newest(self) -> set[tuple[int, str]]:
        return {states[-1] for states in self.states}

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_watchers_share_one_read_per_change() -> None:
    async with bench() as b:
        await b.begin()
        watchers = Watchers(b, 50)
        await settle()
        assert (watchers.newest, watchers.num_reads) == ({(3, "")}, 1)
        for num in range(1, 4):
            await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
            await b.clock.run_for(1.0)
            assert (watchers.newest, watchers.num_reads) == ({(3 + num, "")}, 1 + num)
        await b.clock.run_for(LIMITS.watch_idle_s)
        assert watchers.num_reads == 5, "waits change without a fact, and the read of one watcher serves all"
        await watchers.close()


async def test_many_watchers_get_states_at_a_limited_rate_and_each_gets_the_last_one() -> None:
    num = 2 * STATES_PER_S
    async with bench() as b:
        await b.begin()
        watchers = Watchers(b, num)
        await settle()
        for _ in range(12):
            await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
            await b.clock.run_for(0.25)
        num_states = sum(map(len, watchers.states)) - num
        assert 0.8 * 2.75 * STATES_PER_S < num_states <= 2.75 * STATES_PER_S + 1
        assert watchers.num_reads <= 1 + 12
        assert min(map(len, watchers.states)) >= 2, "each gets its turn"
        await b.ask(m.StopRun, reason="x")
        await b.clock.run_for(LIMITS.watch_interval_s + 2 * num / STATES_PER_S)
        final = await b.driver.read(lambda core, head: (head.position, core.state.ended))
        assert final[1]
        assert watchers.newest == {final}
        await watchers.close()


async def test_a_late_watcher_begins_with_the_current_state_and_reads_only_after_a_change() -> None:
    async with bench() as b:
        await b.begin()
        first = Watchers(b, 1)
        await settle()
        late = Watchers(b, 1)
        await settle()
        assert (late.states, late.num_reads) == ([[(3, "")]], 0)
        await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
        later = Watchers(b, 1)
        await settle()
        assert (later.states, later.num_reads) == ([[(4, "")]], 1), "also before the interval is over"
        for watchers in (first, late, later):
            await watchers.close()


async def test_a_cancelled_watcher_does_not_end_the_read_that_others_share() -> None:
    async with bench() as b:
        await b.begin()
        b.log.holding = True
        b.asking(i.AttachTrainer, **NAMES, last_update=0, digest="")  # reads wait until it is stored
        await settle()
        watchers = Watchers(b, 3)
        await settle()
        watchers.tasks[0].cancel()
        await settle()
        b.log.release()
        await settle()
        assert watchers.states == [[], [(4, "")], [(4, "")]]
        assert watchers.num_reads == 1
        await watchers.close()


async def test_the_error_of_a_shared_read_and_the_close_reach_every_watcher() -> None:
    async with bench() as b:
        await b.begin()

        async def watch() -> None:
            async for _ in b.driver.watch(lambda core, _: 1 // 0, is_shared=True):
                pass

        ends = await asyncio.gather(*(watch() for _ in range(3)), return_exceptions=True)
        assert [str(end) for end in ends if isinstance(end, Internal) and "ZeroDivisionError" in str(end)] == [
            str(ends[0])
        ] * 3
        watchers = Watchers(b, 3)
        await settle()
        assert watchers.newest == {(3, "")}, "later watchers read again"
        await b.driver.close()
        await b.clock.run_for(LIMITS.watch_interval_s + 1.0)
        ends = await asyncio.gather(*watchers.tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [NotReady] * 3


async def test_reads_that_are_rejected_hold_no_memory() -> None:
    async with bench(msgspec.structs.replace(LIMITS, inputs_max=1)) as b:
        await b.begin()
        reads = await asyncio.gather(
            *(b.driver.read(lambda core, head: head) for _ in range(9)), return_exceptions=True
        )
        assert sum(isinstance(found, Overloaded) for found in reads) == 8
        assert not b.driver._reading


# Failure --------------------------------------------------------------------------------------------------------------


async def test_a_foreign_record_in_the_ledger_ends_the_driver() -> None:
    async with bench() as b:
        await b.begin()
        await b.log.append(b"another's", msg_id="another")
        with pytest.raises(NotReady, match="retry at the coordinator that leads it now"):
            await b.acquire()
        assert isinstance(b.failures[0], Fenced)
        with pytest.raises(NotReady):
            await b.ask(m.CreateRun, spec=SPEC)


async def test_a_ledger_that_takes_nothing_ends_the_driver() -> None:
    async with bench() as b:
        await b.begin()
        b.log.close()
        with pytest.raises(NotReady):
            await b.acquire()
        assert isinstance(b.failures[0], DataLoss)
        assert "recovers from what is stored" in str(b.failures[0])


async def test_a_bug_in_the_core_stops_the_driver_after_what_was_decided_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as b:
        await b.begin()
        b.log.holding = True
        before = b.asking(i.AttachTrainer, **NAMES, last_update=0, digest="")
        await settle()
        b.core.state.groups = None  # type: ignore[assignment]
        asked, other = b.asking(i.AcquireRollouts, node_id="w", num_max=2, wait_s=1.0), b.asking(m.StopRun, reason="")
        await settle()
        assert not asked.done()
        b.log.release()
        assert (await before).trainer_epoch == 2
        with pytest.raises(Internal, match="AcquireRollouts failed .* do not repeat the request"):
            await asked
        with pytest.raises(NotReady, match="retry"):
            await other
        with pytest.raises(RunEnded, match="FAILED: "):
            await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
        assert not b.failures
        assert not b.lost
        assert len([r for r in caplog.records if r.exc_info]) == 1


async def test_a_refusal_after_a_part_was_decided_is_a_bug_because_the_ledger_lacks_that_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as b:
        await b.begin()

        def broken(ctx: DecisionContext, request: i.Input) -> None:
            ctx.emit(f.CheckpointReported(policy="main", learner="main", update=9))
            raise Fenced("too late")

        monkeypatch.setitem(core_module._HANDLERS, i.AttachTrainer, broken)
        with pytest.raises(Internal, match="rejected after CheckpointReported was decided: too late"):
            await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
        assert b.core.state.the_clock.checkpoint == 0


async def test_a_bug_outside_the_core_ends_the_run_in_place_and_callers_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench() as b:
        await b.begin()

        async def broken(request: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(b.services, "next_tasks", broken)
        with pytest.raises(NotReady, match="is recovered from its ledger; retry"):
            await b.acquire()
        assert await b.driver.read(lambda core, _: core.state.ended) == "FAILED: ValueError: a bug"
        assert not b.driver.live
        assert not b.lost


async def test_a_bug_in_the_recovery_ends_the_run_and_a_second_one_loses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_bugs, ended in ((1, "FAILED: ValueError: bug 1"), (2, "")):
        async with bench(payload_bytes_max=4_000) as b:
            await b.begin()
            restore = b.driver._restore
            numbers = iter(range(1, num_bugs + 1))

            async def with_bugs(ends: bool, restore: Any = restore, numbers: Any = numbers) -> Any:
                for number in numbers:
                    raise ValueError(f"bug {number}")
                return await restore(ends)

            monkeypatch.setattr(b.driver, "_restore", with_bugs)
            with pytest.raises(PayloadTooLarge if ended else Internal):
                await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="", holder="x" * 5_000)
            if ended:
                assert b.core.state.ended == ended
                assert not b.lost
            else:
                assert len(b.lost) == 1
                with pytest.raises(Internal, match="cannot be recovered because of a bug .*ValueError: bug 2.*restart"):
                    await b.driver.read(lambda core, head: head)
            assert not b.failures


async def test_a_read_that_fails_fails_its_own_call_alone() -> None:
    async with bench() as b:
        await b.begin()
        with pytest.raises(Internal, match="ZeroDivisionError.*nothing has changed"):
            await b.driver.read(lambda core, _: 1 // 0)
        assert (await b.acquire()).leases
        assert not b.core.state.ended


async def test_closing_rejects_all_callers_as_retryable() -> None:
    async with bench() as b:
        await b.begin()
        b.services.hold.clear()
        waiting = b.asking(i.AcquireRollouts, node_id="w", num_max=1, wait_s=100.0)
        watch = b.driver.watch(lambda core, head: head.position)
        await anext(watch)
        watching = asyncio.ensure_future(anext(watch))
        await settle()
        await b.driver.close()
        await b.clock.run_for(LIMITS.watch_interval_s)
        for task in (waiting, watching):
            with pytest.raises(NotReady, match="is stopping; retry"):
                await task


# A full ledger --------------------------------------------------------------------------------------------------------


async def attach_until_ended(b: Bench) -> int:
    """Attach with long names until the run has ended. Returns the number of callers that had to retry."""
    num_retries = 0
    while not await b.driver.read(lambda core, _: core.state.ended):
        try:
            await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="", holder="x" * 1000)
        except NotReady:
            num_retries += 1
    return num_retries


async def test_a_full_ledger_ends_the_run_in_the_room_that_is_made_for_it(caplog: pytest.LogCaptureFixture) -> None:
    async with bench(ledger_bytes_max=20_000) as b:
        await b.begin()
        leases = (await b.acquire()).leases
        assert await attach_until_ended(b) == 1
        reason = await b.driver.read(lambda core, _: core.state.ended)
        assert reason.startswith("LEDGER_FULL: RM_r_LEDGER holds ")
        assert (
            " of 20000 bytes, and the next record does not fit; raise `coordinator.streams.ledger_bytes_max`" in reason
        )
        assert {lease for one in b.services.cancelled for lease in one.lease_ids} == {x.lease_id for x in leases}
        assert (b.failures, b.lost) == ([], [])
        assert len([r for r in caplog.records if "ledger nearly full: run=r used=8" in r.getMessage()]) == 1
        await b.ask(m.StopRun, reason="")
        assert (await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")).trainer_epoch > 1


async def test_a_record_that_the_server_has_no_room_for_ends_the_run_too() -> None:
    """Its limit is lower than it was when the run was opened."""
    async with bench() as b:
        await b.begin()
        b.log.spec = replace(b.log.spec, bytes_max=(await b.log.info()).num_bytes)
        assert await attach_until_ended(b) == 1
        assert (await b.driver.read(lambda core, _: core.state.ended)).startswith("LEDGER_FULL: ")
        assert (b.failures, b.lost) == ([], [])


async def test_an_ended_run_without_room_rejects_requests_and_stays_readable() -> None:
    async with bench() as b:
        await b.begin()
        await b.ask(m.StopRun, reason="enough")
        b.room_bytes = 2_000
        b.log.spec = replace(b.log.spec, bytes_max=(await b.log.info()).num_bytes)
        with pytest.raises(NotReady):  # the server rejects it, then the ledger gets room
            await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
        for _ in range(3):
            with pytest.raises(LedgerFull, match="ledger_bytes_max"):
                await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="", holder="x" * 5_000)
        assert (await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")).trainer_epoch == 2
        assert await b.driver.read(lambda core, _: core.state.ended) == "STOPPED: enough"
        assert (b.failures, b.lost) == ([], [])


async def test_a_run_whose_end_has_no_room_either_is_lost_alone() -> None:
    async with bench() as b:
        await b.begin()
        b.room_bytes = 0
        b.log.spec = replace(b.log.spec, bytes_max=(await b.log.info()).num_bytes)
        with pytest.raises(NotReady):
            await b.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
        with pytest.raises(Internal, match="ledger_bytes_max"):
            await b.driver.read(lambda core, _: core.state.ended)
        assert len(b.lost) == 1
        assert not b.failures


async def test_a_record_that_is_too_large_and_that_no_caller_asked_for_loses_the_run_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench(payload_bytes_max=4_000) as b:
        await b.begin()

        def much(ctx: Any, request: Any) -> None:
            ctx.emit(f.RunStalled(root="x" * 5_000, cause="", stalled_s=1.0))

        monkeypatch.setitem(core_module._HANDLERS, i.Tick, much)
        await b.driver.enqueue(i.Tick())
        await settle()
        with pytest.raises(Internal, match="too large for one record"):
            await b.driver.read(lambda core, _: core.state.ended)
        assert len(b.lost) == 1
        assert not b.failures
