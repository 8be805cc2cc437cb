"""Submitted tasks in the core: each is added once and drawn once, in order; the run waits for more, or ends with the
last."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from rollmesh.services.coordinator.audit import Audit
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core import rollouts
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.facts import AnswerKey, Message, Purpose, Task
from rollmesh.services.coordinator.core.state import State
from rollmesh.services.coordinator.snapshots import encode_state
from rollmesh.shared.errors import RunEnded, TaskConflict, TaskQuota, TasksNotAccepted

from .core_run import CoreRun

LIMITS = i.SubmissionLimits(total_max=100, waiting_max=10, waiting_bytes_max=10_000)


def task(name: str, prompt: str = "1+1?", **fields: Any) -> Task:
    return Task(task_id=name, messages=(Message(role="user", content=prompt),), split="train", **fields)


def submit(
    run: CoreRun,
    *tasks: Task,
    keys: dict[str, str] | None = None,
    finish: bool = False,
    limits: i.SubmissionLimits = LIMITS,
) -> m.SubmitTasksResponse:
    """Submit tasks, with an answer for each task in `keys`."""
    answer_keys = tuple(AnswerKey(task_id=name, answers=(answer,)) for name, answer in (keys or {}).items())
    reply: m.SubmitTasksResponse = run.ask(
        i.SubmitTasks,
        submission=f"{len(run.records) + 1}-ab",
        tasks=tasks,
        answer_keys=answer_keys,
        finish=finish,
        limits=limits,
    )
    return reply


def begun(**spec: Any) -> CoreRun:
    run = CoreRun(**({"submitted_tasks": True} | spec))
    run.begin()
    return run


def drawn(run: CoreRun) -> list[str]:
    return [fact.task.task_id for fact in run.facts if isinstance(fact, f.GroupReserved)]


def waiting_worker(run: CoreRun, num_max: int = 8) -> None:
    run.ask(i.AcquireRollouts, node_id="w", num_max=num_max, wait_s=100.0)


def counts(run: CoreRun) -> tuple[int, int, int]:
    found = run.ask(i.SubmitTasks, submission="x", tasks=(), answer_keys=(), finish=False, limits=LIMITS).submitted
    return found.open, found.drawn, found.answered


def test_each_task_is_one_group_in_the_order_of_submission() -> None:
    run = begun()
    assert submit(run, task("b"), task("a")).num_added == 2
    assert counts(run) == (2, 0, 0)
    run.generate(4, step=0)
    assert drawn(run) == ["b", "a"]
    assert counts(run) == (0, 0, 2)
    groups = [fact for fact in run.facts if isinstance(fact, f.GroupReserved)]
    assert [(group.num_episodes, group.draw) for group in groups] == [(2, 0), (2, 1)]


def test_a_waiting_worker_gets_a_task_in_the_decision_that_adds_it() -> None:
    run = begun()
    waiting_worker(run, num_max=2)
    assert run.core.next_deadline() is not None
    submit(run, task("a"))
    assert drawn(run) == ["a"]
    assert [type(fact).__name__ for fact in run.records[-1].facts] == [
        "TasksSubmitted", "GroupReserved", "EpisodeLeased", "EpisodeLeased",
    ]  # fmt: skip


def test_a_worker_without_a_task_waits_and_the_reason_names_the_client() -> None:
    run = begun()
    acquired: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=2, wait_s=0.0)
    assert acquired.waiting_for == "a client that submits tasks (SubmitTasks): all of 0 submitted tasks are drawn"
    assert drawn(run) == []


def test_the_same_content_is_added_once_also_after_it_was_trained() -> None:
    run = begun()
    keys = {"a": "2"}
    assert submit(run, task("a"), task("b"), keys=keys).num_added == 2
    assert submit(run, task("a"), task("b"), keys=keys).num_added == 0
    run.train(1)
    assert submit(run, task("b"), task("a"), task("c"), keys=keys).num_added == 1
    assert [one.task.task_id for one in run.core.state.submitted_open] == ["c"]
    assert drawn(run) == ["a", "b"]


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        (task("a", "2+2?"), {"a": "2"}),
        (task("a", scorers=("correct",)), {"a": "2"}),
        (task("a", labels={"level": "1"}), {"a": "2"}),
        (task("a", agent="x"), {"a": "2"}),
        (task("a"), {"a": "4"}),
        (task("a"), {}),
    ],
)
def test_other_content_of_a_known_task_is_a_conflict_and_adds_nothing(changed: Task, keys: dict[str, str]) -> None:
    run = begun()
    submit(run, task("a"), keys={"a": "2"})
    num = len(run.records)
    with pytest.raises(TaskConflict, match="task `a`") as caught:
        submit(run, task("new"), changed, keys=keys)
    assert caught.value.metadata["task_id"] == "a"
    assert len(run.records) == num


def test_only_the_fact_of_the_submission_has_the_answer_key() -> None:
    run = begun()
    submit(run, task("a"), task("b", oracle_ref="tests:own"), keys={"a": "Zanzibar"})
    run.generate(4, step=0)
    (submitted,) = [fact for fact in run.facts if isinstance(fact, f.TasksSubmitted)]
    assert submitted.answer_keys == (AnswerKey(task_id="a", answers=("Zanzibar",)),)
    others = [fact for fact in run.facts if not isinstance(fact, f.TasksSubmitted)]
    assert b"Zanzibar" not in msgspec.json.encode(others)
    assert b"Zanzibar" not in encode_state(run.core.state)
    refs = {fact.task.task_id: fact.task.oracle_ref for fact in run.facts if isinstance(fact, f.GroupReserved)}
    assert refs == {"a": f"submitted:r/{submitted.submission}/a", "b": "tests:own"}


@pytest.mark.parametrize(
    ("limits", "named", "again"),
    [
        ({"total_max": 2}, "tasks_max", False),
        ({"waiting_max": 2}, "open_max", True),
        ({"waiting_bytes_max": 200}, "open_bytes_max", True),
    ],
)
def test_a_quota_rejects_the_whole_call(limits: dict[str, int], named: str, again: bool) -> None:
    run = begun()
    strict = dataclasses.replace(LIMITS, **limits)
    submit(run, task("a"), task("b"), limits=strict)
    with pytest.raises(TaskQuota, match=f"{named}`") as caught:
        submit(run, task("c"), limits=strict)
    assert caught.value.metadata[named] == str(*limits.values())
    assert (caught.value.retry_after_s is not None) is again
    assert caught.value.retryable is again
    assert submit(run, task("a"), limits=strict).num_added == 0
    run.generate(4, step=0)
    if again:
        assert submit(run, task("c"), limits=strict).num_added == 1


@pytest.mark.parametrize("limit", [{"waiting_max": 2}, {"waiting_bytes_max": 200}])
def test_a_call_that_never_fits_is_not_retryable(limit: dict[str, int]) -> None:
    run = begun()
    with pytest.raises(TaskQuota, match="per call") as caught:
        submit(run, task("a"), task("b"), task("c"), limits=dataclasses.replace(LIMITS, **limit))
    assert not caught.value.retryable


@pytest.mark.parametrize(("limit", "again"), [("waiting_bytes_max", True), ("ledger_bytes_left", False)])
def test_answer_keys_count_towards_the_sizes(limit: str, again: bool) -> None:
    run = begun()
    strict = dataclasses.replace(LIMITS, **{limit: 5_000})
    submit(run, task("a"), keys={"a": "x" * 2_000}, limits=strict)
    with pytest.raises(TaskQuota, match="open_bytes_max" if again else "ledger_bytes_max") as caught:
        submit(run, task("b"), keys={"b": "x" * 3_000}, limits=strict)
    assert caught.value.retryable is again
    assert submit(run, task("a"), keys={"a": "x" * 2_000}, finish=True, limits=strict).num_added == 0


def test_the_room_of_drawn_tasks_is_free_again() -> None:
    run = begun()
    submit(run, task("a"), task("b"), keys={"a": "2"})
    assert run.core.state.submitted_open_bytes > 0
    run.generate(4, step=0)
    assert run.core.state.submitted_open_bytes == 0


def test_a_run_of_the_data_service_takes_none() -> None:
    run = CoreRun()
    run.begin()
    with pytest.raises(TasksNotAccepted, match="draws its tasks from the data service"):
        submit(run, task("a"))


def test_after_finish_no_task_is_added_and_the_last_groups_fill_a_smaller_batch() -> None:
    run = begun()
    submit(run, task("a"), task("b"), task("c"), finish=True)
    assert submit(run, task("a"), finish=True).num_added == 0
    with pytest.raises(TasksNotAccepted, match="no further tasks follow"):
        submit(run, task("d"))
    run.train(1)
    run.publish(1)
    run.generate(2, step=1)
    last = run.lease(2)
    assert {sample.task for sample in last.samples} == {"c"}
    digest = run.commit(2, last.lease_id)
    assert run.core.state.stopping == "TASKS_EXHAUSTED"
    run.publish(2)
    run.checkpoint(2, digest)
    assert run.core.state.ended == "TASKS_EXHAUSTED"
    assert run.core.state.counters.reasons == {"trained": 6}
    with pytest.raises(RunEnded):
        submit(run, task("e"))
    assert submit(run, task("a"), task("b"), finish=True).num_added == 0
    report = audited(run)
    assert report.holds, report.to_text()


def test_tasks_that_a_limit_cancels_are_open_and_drawn_when_the_run_is_reopened() -> None:
    run = begun(tokens_max=16, max_staleness=3)
    submit(run, *(task(f"t{number}") for number in range(6)), finish=True)
    run.ask(i.AcquireRollouts, node_id="v", num_max=2, wait_s=1.0)
    run.generate(4, step=0)
    assert run.core.state.ended == "TOKENS_MAX"
    assert drawn(run) == ["t0", "t1", "t2"]
    assert {one.task.task_id for one in run.core.state.submitted_open} == {f"t{number}" for number in range(6)}
    assert run.core.state.submitted_open_bytes == sum(one.num_bytes for one in run.core.state.submitted_open)
    run.ask(m.ChangeRun, change_id="c", spec=msgspec.structs.replace(run.core.state.the_spec, tokens_max=0))
    assert counts(run) == (6, 0, 0)
    run.generate(12, step=0)
    assert sorted(drawn(run)[3:]) == [f"t{number}" for number in range(6)]
    assert counts(run) == (0, 0, 6)
    again = Core(State())
    again.replay(run.facts)
    assert encode_state(again.state) == encode_state(run.core.state)


def test_tasks_whose_samples_a_roll_back_makes_void_are_drawn_again() -> None:
    run = begun()
    submit(run, *(task(f"t{number}") for number in range(4)))
    run.train(1)
    run.publish(1)
    run.generate(4, step=1)
    run.attach(last_update=0, digest="")
    run.publish(0, incarnation=1)
    run.lease(1)
    assert run.core.state.counters.reasons == {"stale/VOID_VERSION": 4}
    assert {one.task.task_id for one in run.core.state.submitted_open} == {"t2", "t3"}
    run.commit(1, run.lease(1).lease_id)
    run.publish(1, incarnation=1)
    run.generate(4, step=1, incarnation=1)
    assert sorted(drawn(run)) == ["t0", "t1", "t2", "t2", "t3", "t3"]
    assert audited(run).holds


def test_a_group_that_was_used_in_part_or_failed_is_not_drawn_again() -> None:
    run = CoreRun(submitted_tasks=True, export_groups=9)
    run.begin()
    submit(run, task("a"))
    run.generate(1, step=0)
    run.ask(m.StopRun, reason="")
    assert counts(run) == (0, 0, 1)
    run = begun(tries_max=1)
    submit(run, task("a"))
    run.ask(i.AcquireRollouts, node_id="w", num_max=2, wait_s=1.0)
    run.take(run.core.handle(i.NodeDead(node_id="w"), run.now))
    assert counts(run) == (0, 0, 1)


def test_without_finish_too_few_groups_wait_for_further_tasks() -> None:
    run = begun()
    submit(run, task("a"))
    run.generate(2, step=0)
    assert run.lease(1).waiting_for.startswith("READY groups: 1 of 2, 0 on their way: the run waits for a client")
    submit(run, finish=True)
    assert {sample.task for sample in run.lease(1).samples} == {"a"}


def test_finish_without_a_task_ends_the_run() -> None:
    run = begun()
    submit(run, finish=True)
    assert run.core.state.ended == "TASKS_EXHAUSTED"


def test_an_export_of_submitted_tasks_ends_with_the_last() -> None:
    run = CoreRun(submitted_tasks=True, export_groups=1000)
    run.begin()
    submit(run, task("a"), task("b"))
    run.generate(4, step=0)
    assert run.core.state.ended == ""
    submit(run, task("c"), finish=True)
    run.generate(2, step=0)
    assert run.core.state.ended == "TASKS_EXHAUSTED"
    assert run.core.state.counters.reasons == {"exported": 6}
    assert {fact.purpose for fact in run.facts if isinstance(fact, f.GroupReserved)} == {Purpose.EXPORT}


def test_a_recovered_core_draws_the_rest_and_knows_all_keys() -> None:
    run = begun()
    submit(run, task("a"), task("b"), task("c"), keys={"a": "2"})
    run.generate(2, step=0)
    again = Core(State())
    again.replay(run.facts)
    assert encode_state(again.state) == encode_state(run.core.state)
    run.core = again
    run.take(again.resume(run.now))
    assert submit(run, task("a"), task("c"), keys={"a": "2"}).num_added == 0
    run.generate(2, step=0)
    assert drawn(run) == ["a", "b"]


def test_tasks_beyond_a_record_are_drawn_by_the_next_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "SUBMITTED_BYTES_MAX", 300)
    run = begun(max_staleness=9)
    waiting_worker(run)
    waiting_worker(run)
    submit(run, *(task(name, "x" * 100) for name in "abcd"))
    assert drawn(run) == ["a"]
    assert run.core.next_deadline() == run.now
    run.take(run.core.handle(i.Tick(), run.now))
    assert drawn(run) == ["a", "b"]
    run.take(run.core.handle(i.Tick(), run.now))
    assert run.core.next_deadline() != run.now  # no worker waits for the rest


def test_a_run_that_only_waits_for_tasks_is_not_stalled_and_one_with_open_tasks_is() -> None:
    run = begun(stall_s=10.0)
    run.now = 100.0
    assert not run.core.is_stalled(run.now)
    submit(run, task("a"))
    assert not run.core.is_stalled(run.now + 9.0)
    assert run.core.is_stalled(run.now + 10.0)


def test_a_full_batch_that_no_trainer_leases_is_a_stall() -> None:
    run = begun(stall_s=10.0)
    submit(run, task("a"), task("b"))
    run.generate(4, step=0)
    assert run.core.is_stalled(run.now + 10.0)


def test_a_run_without_a_version_that_the_nodes_accept_does_not_wait_for_tasks() -> None:
    run = CoreRun(submitted_tasks=True, stall_s=10.0)
    run.attach()
    assert run.core.is_stalled(run.now + 10.0)
    run.publish(0)
    assert not run.core.is_stalled(run.now + 10.0)
    published = run.core.state.the_clock.versions[-1]
    run.take(run.core.handle(i.VersionRejected(version=published, cause="x"), run.now))
    assert run.core.is_stalled(run.now + 10.0)


def test_a_trainer_that_wants_more_groups_than_there_are_waits_for_tasks() -> None:
    run = begun(stall_s=10.0)
    submit(run, task("a"), task("b"))
    run.generate(4, step=0)
    amount = i.LeaseBatch(
        ticket=99, policy="main", learner="main", trainer_epoch=run.epoch, update=1, amount=3, wait_s=60.0
    )
    run.take(run.core.handle(amount, run.now))
    assert not run.core.is_stalled(run.now + 10.0)


def test_the_time_of_a_stall_begins_after_the_wait_for_tasks() -> None:
    run = begun(stall_s=10.0)
    submit(run, task("a"))
    run.generate(2, step=0)
    run.now = 1000.0
    submit(run, finish=True)
    assert run.lease(1).lease_id
    assert not run.core.is_stalled(run.now + 9.0)
    assert run.core.is_stalled(run.now + 10.0)


def audited(run: CoreRun) -> Any:
    audit = Audit()
    for record in run.records:
        audit.enter(record)
    return audit.report()
