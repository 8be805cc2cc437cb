"""Effects: a request is retried until it has a result, with back-off, and never in a hot loop."""

from __future__ import annotations

import msgspec
import pytest

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.batches import group_members
from rollmesh.services.coordinator.core.facts import PayloadRef, SampleMeta, SampleSummary, StepSpan, TurnSummary
from rollmesh.services.coordinator.driver import without_purged
from rollmesh.services.coordinator.fact_codec import decode, encode
from rollmesh.shared.errors import GroupCodeFailed, InfraFailure, InvalidInput, MeshError, Unavailable
from rollmesh.v1 import types_pb2

from .driver_bench import LIMITS, Bench, bench, settle

# Calls to others ------------------------------------------------------------------------------------------------------


async def test_an_unavailable_data_service_is_retried_with_growing_back_off() -> None:
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


@pytest.mark.parametrize(
    ("eval_tasks", "page_max", "draws_max", "num", "asked"),
    [
        (1500, 10**9, 10**9, 1500, ["draw 0+1024", "draw 1024+476"]),
        (1500, 10**9, 1100, 1100, ["draw 0+1024", "draw 1024+476", "draw 1100+400"]),
        (5, 2, 10**9, 5, ["draw 0+5", "draw 2+3", "draw 4+1"]),
    ],
    ids=["above one page", "split ends", "response cut"],
)
async def test_the_tasks_of_an_evaluation_are_drawn_page_by_page(
    eval_tasks: int, page_max: int, draws_max: int, num: int, asked: list[str]
) -> None:
    async with bench(payload_bytes_max=8 << 20) as b:
        b.services.page_max, b.services.draws_max = page_max, draws_max
        await b.begin(eval_every=1, eval_tasks=eval_tasks)
        await settle()
        assert b.services.asked == asked
        assert b.core.state.eval_counters.reserved == num


async def test_an_evaluation_whose_tasks_fit_into_no_record_is_dropped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with bench() as b:
        b.services.text, b.services.page_max = "x" * (1 << 20), 1
        await b.begin(eval_every=1, eval_tasks=100)
        await settle()
        assert len(b.services.asked) == 6
        assert b.core.state.eval_counters.reserved == 0
        assert b.core.ephemeral.evals_dropped == {(0, 0)}
    assert "no evaluation of step 0: the first 6 tasks have more than 6291456 bytes" in caplog.text
    assert "lower `run.eval_tasks` (now 100)" in caplog.text


async def test_a_reward_service_that_is_away_never_decides_by_its_absence() -> None:
    async with bench() as b:
        await b.begin()
        b.services.decisions_failing = 4
        await _score_all(b, (await b.acquire()).leases)
        assert [g.phase.name for g in b.core.state.groups.values()] == ["FINALIZING"]
        await b.clock.run_for(1.0 + 2.0 + 4.0 + 4.0 + 0.1)
        assert [g.phase.name for g in b.core.state.groups.values()] == ["READY"]
        assert b.services.asked.count("finalize g0") == 5


@pytest.mark.parametrize("error", [InfraFailure("the scorer broke"), InvalidInput("a bad group")])
async def test_a_reward_service_that_rejects_a_group_is_called_finalize_tries_max_times(
    error: MeshError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures while the service was unavailable do not count, before or between the rejections."""
    async with bench(msgspec.structs.replace(LIMITS, finalize_tries_max=2)) as b:
        await b.begin()
        errors = iter([Unavailable("away"), error, Unavailable("away"), error])
        asked: list[float] = []

        async def rejects(request: object) -> None:
            asked.append(b.clock.monotonic_s())
            raise next(errors)

        monkeypatch.setattr(b.services, "finalize_group", rejects)
        await _score_all(b, (await b.acquire()).leases)
        for _ in range(4):
            await b.clock.run_for(LIMITS.backoff_s_max)
        assert len(asked) == 4
        assert not b.core.state.groups
        assert b.core.state.counters.reasons["failed/NOT_FINALIZED"] == 2
        assert not b.core.ephemeral.finalizing


async def test_a_group_on_which_the_users_estimator_raises_fails_at_once_with_its_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with bench(LIMITS) as b:
        await b.begin()

        async def raises(request: object) -> None:
            raise GroupCodeFailed("estimator bad.py:Bad: KeyError: 'a'\nline 7")

        monkeypatch.setattr(b.services, "finalize_group", raises)
        await _score_all(b, (await b.acquire()).leases)
        await settle()
        failed = b.core.ephemeral.failed
        assert (failed.cause, failed.traceback) == ("estimator bad.py:Bad: KeyError: 'a'", "line 7")
        assert failed.num_undecided == b.core.state.counters.reasons["failed/NOT_FINALIZED"] == 2


async def test_a_group_that_vanished_settles_its_question() -> None:
    async with bench() as b:
        await b.begin()
        b.services.decisions_failing = 1
        await _score_all(b, (await b.acquire()).leases)
        await settle()
        await b.ask(m.StopRun, reason="x")
        await b.clock.run_for(1.1)
        await settle()
        assert not b.core.ephemeral.finalizing
        assert b.services.asked.count("finalize g0") == 1


async def test_the_finalizer_and_the_trainer_see_the_summaries_and_the_labels_of_the_task() -> None:
    async with bench() as b:
        await b.begin()
        leases = (await b.acquire()).leases
        assert [lease.index for lease in leases] == [0, 1]
        await _score_all(b, leases)
        await settle()
        (request,) = b.services.finalized
        assert request.group.labels == {"level": "0"}
        assert [m.summary.role for m in request.group.members] == ["player 0", "player 1"]
        assert request.group.members[1].summary.turns[0].observation == "ab" * 8
        (group,) = b.core.state.groups.values()
        seen = group_members(group)
        assert encode(seen, types_pb2.GroupContext) == request.group
        older = request.group
        for member in older.members:  # as a worker of older protos reports it
            member.ClearField("summary")
        assert [m.summary for m in decode(type(seen), older).members] == [SampleSummary()] * 2


async def _score_all(b: Bench, leases: tuple[i.EpisodeLease, ...]) -> None:
    for lease in leases:
        meta = SampleMeta(
            sample_id=f"{lease.episode}.0",
            policy="main",
            steps=(StepSpan(num_tokens=1),),
            num_tokens=1,
            summary=SampleSummary(
                role=f"player {lease.index}", turns=(TurnSummary(num_tokens=1, observation="ab" * 8),)
            ),
        )
        report = i.EpisodeReport(
            lease_id=lease.lease_id,
            group=lease.group,
            episode=lease.episode,
            attempt=lease.attempt,
            outcome=m.EpisodeOutcome.COMPLETED,
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
            outcome=m.EpisodeOutcome.COMPLETED,
            payload=PayloadRef(sequence=sequence),
        )
        for sequence in (0, 4, 5)
    )
    request = i.ReportEpisodes(ticket=1, node_id="w", reports=reports)
    assert [r.attempt for r in without_purged(request, lambda sequence: 0 < sequence < 5).reports] == [1, -1, 1]
    assert without_purged(request, lambda _: False) is request
