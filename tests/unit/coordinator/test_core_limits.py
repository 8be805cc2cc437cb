"""Limits of a run: updates, seconds, tokens, success, tasks. A reached limit remains."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.facts import PayloadRef, Purpose, Reward, SampleMeta, StepSpan
from rollmesh.services.coordinator.core.limits import COUNT_EVERY_S
from rollmesh.services.coordinator.run_state import run_state
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.errors import MeshError

from .core_run import NAMES, CoreRun

EVALUATED: dict[str, Any] = {"eval_every": 1, "eval_tasks": 4}


def tick(run: CoreRun, seconds: float = 0.0) -> None:
    run.now += seconds
    run.take(run.core.handle(i.Tick(), run.now))


def end_well(run: CoreRun, update: int, digest: str) -> None:
    """Do what a trainer does when there is no further batch."""
    run.checkpoint(update, digest)
    run.publish(update)


def evaluate(run: CoreRun, *, solved: int, scored: int, step: int, value: float = 1.0) -> None:
    """Finish the open evaluation: `scored` tasks get a reward, the first `solved` of them `value`, the rest 0; the
    others get no score."""
    acquired: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=64, wait_s=1.0)
    leases = [lease for lease in acquired.leases if lease.purpose is Purpose.EVAL]
    for number, lease in enumerate(leases):
        reward = Reward(name="correct", value=value * (number < solved), segment=-1, scorer="exact@1")
        meta = SampleMeta(
            sample_id=f"{lease.episode}.0",
            policy="main",
            steps=(StepSpan(step=step, num_tokens=4),),
            num_tokens=8,
            num_sampled_tokens=4,
            rewards=(reward,),
        )
        report = i.EpisodeReport(
            lease_id=lease.lease_id,
            group=lease.group,
            episode=lease.episode,
            attempt=lease.attempt,
            outcome=m.EpisodeOutcome.COMPLETED,
            payload=PayloadRef(sequence=1000 + number, size_bytes=1),
            samples=(meta,) if number < scored else (),
        )
        run.ask(i.ReportEpisodes, node_id="w", reports=(report,))


def test_tokens_max_ends_the_run_once_its_samples_have_so_many_tokens() -> None:
    run = CoreRun(tokens_max=16)
    run.begin()
    run.generate(2, step=0)
    assert run.core.state.stopping == ""
    run.generate(2, step=0)  # 4 samples of 8 tokens, of which 4 were sampled
    assert run.core.state.ended == "TOKENS_MAX"  # step 0 is published and needs no checkpoint


def test_reached_limit_lets_the_update_under_way_finish_and_begins_no_other() -> None:
    run = CoreRun(seconds_max=100.0, batch_lease_s=1000.0)
    run.begin()
    run.generate(4, step=0)
    batch = run.lease(1)
    tick(run, 100.0)
    assert (run.core.state.stopping, run.core.state.ended) == ("SECONDS_MAX", "")
    assert run.core.state.training_groups() == []
    digest = run.commit(1, batch.lease_id)
    with pytest.raises(MeshError, match="SECONDS_MAX") as refused:
        run.lease(2)
    assert refused.value.reason == "RUN_ENDED"
    assert run.core.state.ended == ""
    end_well(run, 1, digest)
    assert run.core.state.ended == "SECONDS_MAX"


def test_waiting_trainer_gets_a_reply_when_a_limit_is_reached() -> None:
    run = CoreRun(seconds_max=10.0)
    run.begin()
    decision = run.core.handle(
        i.LeaseBatch(ticket=99, **NAMES, trainer_epoch=run.epoch, update=1, wait_s=60.0), run.now
    )
    assert run.take(decision) == {}
    run.now += 10.0
    replies = run.take(run.core.handle(i.Tick(), run.now))
    assert replies[99].waiting_for == "run ends: SECONDS_MAX"


def test_seconds_are_counted_over_lives_and_are_the_same_by_a_fold() -> None:
    run = CoreRun(seconds_max=50.0)
    run.begin()
    for _ in range(3):
        tick(run, COUNT_EVERY_S)
    tick(run, COUNT_EVERY_S - 1)  # the kill loses this time
    assert run.core.state.seconds == pytest.approx(30.0)
    run.core = Core()
    run.core.replay(run.facts)
    run.now = 7_000.0  # another boot, another clock
    run.take(run.core.resume(run.now))
    assert run.core.state.seconds == pytest.approx(30.0)
    tick(run, COUNT_EVERY_S)
    deadline = run.core.next_deadline()
    assert deadline is not None
    assert deadline <= run.now + 10.0
    tick(run, COUNT_EVERY_S)
    assert run.core.state.ended == "SECONDS_MAX"
    assert sum(fact.seconds for fact in run.facts if isinstance(fact, f.TimeCounted)) == pytest.approx(50.0)


@pytest.mark.parametrize(("solved", "scored", "ends"), [(3, 4, "SUCCESS_TARGET"), (2, 4, ""), (2, 2, "")])
def test_success_target_counts_unscored_tasks_as_not_solved(solved: int, scored: int, ends: str) -> None:
    run = CoreRun(success_target=0.7, **EVALUATED)
    run.begin()
    evaluate(run, solved=solved, scored=scored, step=0)
    assert run.core.state.evals[0].num_open == 0
    assert run.core.state.ended == ends


@pytest.mark.parametrize(("value", "graded"), [(1.0, False), (0.0, False), (0.5, True), (2.0, True)])
def test_an_evaluation_says_whether_its_success_rewards_are_graded(value: float, graded: bool) -> None:
    run = CoreRun(**EVALUATED)
    run.begin()
    evaluate(run, solved=1, scored=4, step=0, value=value)
    (result,) = run_state(run.core, LedgerHead()).evals
    assert result.graded == graded


def test_reached_success_stays_reached_when_the_last_weights_do_worse() -> None:
    run = CoreRun(success_target=0.9, **EVALUATED)
    run.begin()
    acquired = run.ask(i.AcquireRollouts, node_id="v", num_max=4, wait_s=1.0)  # the evaluation, kept open
    run.generate(4, step=0)
    batch = run.lease(1)
    for lease in acquired.leases:
        run.ask(i.ReportEpisodes, node_id="v", reports=(i.EpisodeReport(
            lease_id=lease.lease_id, group=lease.group, episode=lease.episode, attempt=lease.attempt,
            outcome=m.EpisodeOutcome.COMPLETED, payload=PayloadRef(sequence=900, size_bytes=1),
            samples=(SampleMeta(sample_id=f"{lease.episode}.0", policy="main", num_tokens=8,
                num_sampled_tokens=4,
                                steps=(StepSpan(step=0, num_tokens=4),), rewards=(Reward(name="correct", value=1.0),)),),
        ),))  # fmt: skip
    assert run.core.state.stopping == "SUCCESS_TARGET"
    digest = run.commit(1, batch.lease_id)
    end_well(run, 1, digest)
    assert run.core.state.ended == ""  # the last weights are evaluated, too
    evaluate(run, solved=0, scored=4, step=1)
    assert [e.step for e in run.core.state.evals] == [0, 1]
    assert run.core.state.ended == "SUCCESS_TARGET"


def test_roll_back_below_the_last_update_takes_the_limit_back() -> None:
    run = CoreRun(updates_max=1)
    run.begin()
    run.train(1)
    assert run.core.state.stopping == "UPDATES_MAX"
    run.attach(0, "")  # the checkpoint is lost
    assert run.core.state.stopping == ""
    run.publish(0, incarnation=1)
    digest = run.commit(1, run.lease(1).lease_id)  # its groups are READY again
    run.checkpoint(1, digest)
    run.publish(1, incarnation=1)
    assert run.core.state.ended == "UPDATES_MAX"


def exhausted_after(run: CoreRun, num_draws: int) -> None:
    """Let the data service have this number of tasks."""
    handle = run.core.handle

    def limited(request: i.Input, now: float) -> Any:
        if isinstance(request, i.TasksDrawn) and request.purpose is Purpose.TRAIN:
            left = tuple(task for task in request.tasks if task[0] < num_draws)
            request = i.TasksDrawn(purpose=Purpose.TRAIN, tasks=left)
            if not left:
                return handle(i.DrawFailed(purpose=Purpose.TRAIN, cause="EXHAUSTED", exhausted=True), now)
        return handle(request, now)

    run.core.handle = limited  # type: ignore[method-assign]


def test_exhausted_source_ends_the_run_when_nothing_is_in_flight() -> None:
    run = CoreRun()
    exhausted_after(run, 3)
    run.begin()
    digest = run.train(1)
    run.publish(1)
    run.generate(2, step=0)  # the third group, half a batch
    run.ask(i.AcquireRollouts, node_id="w", num_max=2, wait_s=1.0)  # requests work, and learns that there is none
    assert run.core.ephemeral.exhausted
    assert run.core.state.stopping == ""  # a trainer may take smaller batches, but it has not asked yet
    assert run.lease(2).waiting_for.startswith("READY groups: 1 of 2")
    assert run.core.state.stopping == "TASKS_EXHAUSTED"
    end_well(run, 1, digest)
    assert run.core.state.ended == "TASKS_EXHAUSTED"
    assert run.core.state.counters.conserved
    assert run.core.state.counters.live == 0


def test_exhausted_source_waits_for_what_is_in_flight() -> None:
    run = CoreRun()
    exhausted_after(run, 2)
    run.begin()
    acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=4, wait_s=1.0)
    run.ask(i.AcquireRollouts, node_id="w", num_max=2, wait_s=1.0)
    assert len(acquired.leases) == 4
    assert run.core.ephemeral.exhausted
    assert run.core.state.stopping == ""
