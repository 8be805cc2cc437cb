"""Decisions of run.proto where a contract has two readings: leases, commits, releases, roll forward, publication,
end."""

from __future__ import annotations

import time
from typing import Any

import pytest

from rollmesh.services.coordinator.core import core as core_module
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.decision_context import DeadLetter
from rollmesh.services.coordinator.core.facts import (
    DroppedSample,
    ExternalSpan,
    GroupDecision,
    Purpose,
    Reward,
    SampleEnd,
    SampleMeta,
    SampleSummary,
    SegmentSource,
    StepSpan,
)
from rollmesh.services.coordinator.core.records import Request, RunSpec, TrainerRequest
from rollmesh.services.coordinator.core.state import EpisodeStatus, GroupPhase
from rollmesh.shared.domain.digest import next_digest
from rollmesh.shared.domain.sources import ExternalSource
from rollmesh.shared.domain.versions import PolicyVersion
from rollmesh.shared.errors import MeshError

from .core_run import NAMES, CoreRun

SAMPLES, TOKENS = i.GeometryUnit.SAMPLES, i.GeometryUnit.TOKENS


def refusal(run: CoreRun, kind: type, **fields: Any) -> MeshError:
    with pytest.raises(MeshError) as caught:
        run.ask(kind, **fields)
    return caught.value


def trainer(run: CoreRun, **fields: Any) -> dict[str, Any]:
    return {**NAMES, "trainer_epoch": run.epoch, **fields}


def leased(num: int = 4, **spec: Any) -> tuple[CoreRun, m.LeaseBatchResponse]:
    """A run with `num` READY samples of step 0, and the batch of update 1."""
    run = CoreRun(**spec)
    run.begin()
    run.generate(num, step=0)
    batch = run.lease(1)
    assert batch.lease_id, batch.waiting_for
    return run, batch


def ids(batch: m.LeaseBatchResponse | m.GetBatchResponse) -> list[str]:
    return [sample.meta.sample_id for sample in batch.samples]


# Leases ---------------------------------------------------------------------------------------------------------------


def test_a_lease_id_is_never_reused_so_a_late_release_has_no_effect() -> None:
    run, first = leased()
    run.ask(m.ReleaseBatch, **trainer(run, lease_id=first.lease_id))
    second = run.lease(1)
    assert second.lease_id != first.lease_id
    run.ask(m.ReleaseBatch, **trainer(run, lease_id=first.lease_id))  # the repetition of the first release, late
    assert run.lease(1).lease_id == second.lease_id
    assert refusal(run, i.CommitUpdate, **trainer(run, update=1, lease_ids=(first.lease_id,))).reason == "UNKNOWN_LEASE"
    recovered = Core()
    recovered.replay(run.facts)
    assert recovered.state == run.core.state
    assert (recovered.state.num_batches, recovered.state.released) == (2, [first.lease_id])


def test_a_repeated_lease_says_how_long_it_still_runs_and_keeps_its_geometry() -> None:
    run, batch = leased(batch_lease_s=60.0)
    run.now += 40.0
    again: m.LeaseBatchResponse = run.ask(i.LeaseBatch, **trainer(run, update=1, unit=SAMPLES, amount=1))
    assert (again.lease_id, ids(again), again.lease_s) == (batch.lease_id, ids(batch), 20.0)
    run.ask(m.RenewBatch, **trainer(run, lease_id=batch.lease_id))
    assert run.lease(1).lease_s == 60.0


def test_an_episode_lease_is_renewed_by_its_worker_alone() -> None:
    run = CoreRun(episode_lease_s=10.0)
    run.begin()
    (lease,) = run.ask(i.AcquireRollouts, node_id="w", num_max=1, wait_s=1.0).leases
    names = (lease.lease_id, f"{lease.episode}#2", "g9.0#1", "nonsense")
    run.now += 6.0
    assert run.ask(m.RenewLeases, node_id="another", lease_ids=names).gone == names
    assert run.core.ephemeral.episode_deadlines[lease.lease_id] == run.now + 4.0, "not renewed"
    assert run.ask(m.RenewLeases, node_id="w", lease_ids=names).gone == names[1:]
    assert run.core.ephemeral.episode_deadlines[lease.lease_id] == run.now + 10.0


def test_every_request_has_a_handler() -> None:
    """`WatchReady` is only read. The driver would take a request without a handler for a bug, and end the run."""
    requests: set[type] = set()
    bases: list[type] = [Request]
    while bases:
        found: list[type] = bases.pop().__subclasses__()
        bases += found
        requests.update(found)
    assert requests - set(core_module._HANDLERS) == {TrainerRequest, i.WatchReady}


def ahead(run: CoreRun, known: set[str], **fields: Any) -> list[str]:
    request = i.WatchReady(**trainer(run, ticket=0, **fields))
    return [sample.meta.sample_id for sample in run.core.ready_ahead(request, known)]


def test_the_samples_ahead_are_those_of_the_next_batch_each_once_and_are_not_leased() -> None:
    run = CoreRun(max_staleness=2, batch_groups=2, group_size=1)
    run.begin()
    known: set[str] = set()
    assert ahead(run, known) == []
    made = run.generate(3, step=0)
    facts = len(run.facts)
    assert ahead(run, known) == made[:2]
    assert ahead(run, known) == []
    assert ahead(run, set(), unit=SAMPLES, amount=3) == made
    assert len(run.facts) == facts, "reading ahead decides nothing"
    assert ids(run.lease(1)) == made[:2]
    assert ahead(run, known) == made[2:]
    run.ask(m.ReleaseBatch, **trainer(run, lease_id=run.lease(1).lease_id))
    assert ahead(run, known) == made[:2], "they were leased in between"


def test_a_fenced_trainer_and_an_ended_run_read_nothing_ahead() -> None:
    run = CoreRun()
    run.begin()
    with pytest.raises(MeshError, match="fenced") as fenced:
        ahead(run, set(), trainer_epoch=run.epoch - 1)
    assert fenced.value.reason == "FENCED"
    run.ask(m.StopRun, reason="enough")
    with pytest.raises(MeshError, match="has ended") as ended:
        ahead(run, set())
    assert ended.value.reason == "RUN_ENDED"


def test_a_gateway_reads_only_the_samples_that_it_names() -> None:
    run, batch = leased()
    wanted = ids(batch)[1:3]
    fields = {"trainer_epoch": run.epoch, "lease_id": batch.lease_id}
    assert ids(run.ask(m.GetBatch, **fields)) == ids(batch)
    assert ids(run.ask(m.GetBatch, **fields, sample_ids=tuple(wanted))) == wanted
    fenced = refusal(run, m.GetBatch, **fields | {"trainer_epoch": run.epoch - 1})
    assert (fenced.reason, fenced.metadata["current_epoch"]) == ("FENCED", str(run.epoch))
    assert fenced.message.endswith("attach again from the newest checkpoint")


@pytest.mark.parametrize(
    ("unit", "most"),
    [(i.GeometryUnit.GROUPS, 4), (SAMPLES, 4 * 2 * 4 * 4096), (TOKENS, 4 * 2 * 4 * 4096 * (2**31 - 1))],
)
def test_an_amount_that_admission_never_supplies_is_refused_with_the_largest(unit: i.GeometryUnit, most: int) -> None:
    run = CoreRun()
    run.begin()
    error = refusal(run, i.LeaseBatch, **trainer(run, update=1, unit=unit, amount=most + 1))
    assert (error.reason, error.violations[0].field, error.metadata["amount_max"]) == (
        "INVALID_INPUT",
        "geometry.amount",
        str(most),
    )
    assert f"must be in [1, {most}] {unit.name.lower()} for update 1, got {most + 1}; max_staleness" in error.message
    run.ask(i.LeaseBatch, **trainer(run, update=1, unit=unit, amount=most, wait_s=1.0))


def test_the_last_updates_of_a_run_have_fewer_groups() -> None:
    run = CoreRun(max_staleness=5, updates_max=2)
    run.begin()
    error = refusal(run, i.LeaseBatch, **trainer(run, update=1, unit=i.GeometryUnit.GROUPS, amount=5))
    assert error.metadata["amount_max"] == "4"


@pytest.mark.parametrize("unit", [SAMPLES, TOKENS])
def test_when_nothing_more_can_become_ready_what_is_ready_is_leased(unit: i.GeometryUnit) -> None:
    run = CoreRun(max_staleness=0, batch_groups=1)
    run.begin()
    ask = trainer(run, update=1, unit=unit, amount=500)
    waiting: m.LeaseBatchResponse = run.ask(i.LeaseBatch, **ask)
    assert (
        waiting.waiting_for
        == f"READY {unit.name.lower()}: 0 of 500, 0 groups on their way: the run waits for a rollout worker that requests episodes"
    )
    run.generate(1, step=0)
    waiting = run.ask(i.LeaseBatch, **ask)
    assert waiting.waiting_for == f"READY {unit.name.lower()}: 0 of 500, 1 group on their way"
    run.generate(1, step=0)
    assert len(run.ask(i.LeaseBatch, **ask).samples) == 2


def test_a_trainer_that_waits_reads_that_the_nodes_rejected_its_weights_until_others_are_published() -> None:
    run = CoreRun()
    run.begin()
    version = PolicyVersion(policy="main", step=0, incarnation=0, weights_digest="w0.0")
    run.take(run.core.handle(i.VersionRejected(version=version, cause="tensor a has a NaN"), run.now))
    run.ask(i.AcquireRollouts, node_id="w", num_max=4, wait_s=1.0)
    ask = trainer(run, update=1)
    assert run.ask(i.LeaseBatch, **ask).waiting_for == (
        "READY groups: 0 of 2, 2 on their way; main@0.0 was rejected: tensor a has a NaN"
    )
    assert "learner/main" not in run.core.waiting()
    run.ask(i.LeaseBatch, **ask, wait_s=5.0)
    assert "tensor a has a NaN" in run.core.waiting()["learner/main"]
    run.ask(m.StopRun, reason="enough")
    assert run.core.waiting() == {}


# Commits --------------------------------------------------------------------------------------------------------------


def drop(*names: str) -> tuple[DroppedSample, ...]:
    return tuple(DroppedSample(sample_id=name, reason="TOO_LONG") for name in names)


def test_the_same_commit_has_the_same_digest_and_any_other_is_a_conflict() -> None:
    run, batch = leased()
    a, b = ids(batch)[:2]
    commit = trainer(run, update=1, lease_ids=(batch.lease_id,), dropped=drop(a))
    digest = run.ask(i.CommitUpdate, **commit).digest
    assert digest == next_digest("", 1, ids(batch)[1:])
    run.checkpoint(1, digest)  # the samples leave memory
    assert run.ask(i.CommitUpdate, **commit).digest == digest
    for other in (
        {"dropped": drop(b)},
        {"dropped": ()},
        {"dropped": drop(a, b)},
        {"applied": False},
        {"lease_ids": ()},
    ):
        assert refusal(run, i.CommitUpdate, **(commit | other)).reason == "COMMIT_CONFLICT", other


def test_a_commit_names_the_lease_that_is_out() -> None:
    run, batch = leased()
    error = refusal(run, i.CommitUpdate, **trainer(run, update=1, lease_ids=()))
    assert error.reason == "LEASE_OUT"
    assert batch.lease_id in error.message
    run.ask(m.ReleaseBatch, **trainer(run, lease_id=batch.lease_id))
    empty = run.ask(i.CommitUpdate, **trainer(run, update=1, lease_ids=()))
    assert empty.digest == next_digest("", 1, [])


def test_an_empty_commit_beside_an_expired_lease_is_expired() -> None:
    run, _ = leased(batch_lease_s=5.0)
    run.now += 6.0
    run.take(run.core.handle(i.Tick(), run.now))
    assert refusal(run, i.CommitUpdate, **trainer(run, update=1, lease_ids=())).reason == "LEASE_EXPIRED"


# Releases, checkpoints, publication -----------------------------------------------------------------------------------


def test_releasing_again_is_ok_within_the_epoch_alone() -> None:
    run, batch = leased()
    for _ in range(2):
        run.ask(m.ReleaseBatch, **trainer(run, lease_id=batch.lease_id))
    assert refusal(run, m.ReleaseBatch, **trainer(run, lease_id="b9.9.9.9")).reason == "UNKNOWN_LEASE"
    run.attach()
    run.publish(0)
    assert refusal(run, m.ReleaseBatch, **trainer(run, lease_id=batch.lease_id)).reason == "UNKNOWN_LEASE"


def test_update_0_has_the_empty_digest() -> None:
    run = CoreRun()
    run.begin()
    run.checkpoint(0, "")
    error = refusal(run, m.ReportCheckpoint, **trainer(run, update=0, digest="0" * 64))
    assert error.reason == "DIGEST_MISMATCH"


def test_a_publication_may_be_repeated_after_the_next_commit() -> None:
    run, batch = leased()
    run.commit(1, batch.lease_id)
    run.publish(0)  # its response was lost
    run.publish(1)
    published = [fact.version.step for fact in run.facts if isinstance(fact, f.VersionPublished)]
    assert published == [0, 1]
    for step, incarnation, reason in ((0, 0, "VERSION_CONFLICT"), (2, 0, "WRONG_VERSION"), (1, 1, "WRONG_VERSION")):
        version = PolicyVersion(policy="main", step=step, incarnation=incarnation, weights_digest="other")
        assert refusal(run, i.PublishVersion, **trainer(run, version=version)).reason == reason


def test_a_version_of_an_earlier_incarnation_is_not_published_again() -> None:
    run, batch = leased()
    run.commit(1, batch.lease_id)
    run.attach(0)
    version = PolicyVersion(policy="main", step=0, incarnation=0, weights_digest="w0.0")
    assert refusal(run, i.PublishVersion, **trainer(run, version=version)).reason == "WRONG_VERSION"


# Roll forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [True, False])
def test_an_update_with_dropped_samples_or_skipped_is_rolled_forward(applied: bool) -> None:
    run, batch = leased()
    first, *rest = ids(batch)
    digest = next_digest("", 1, rest if applied else [])
    outcome: dict[str, Any] = {"dropped": drop(first), "named": (first,), "applied": applied}
    bare = refusal(run, i.AttachTrainer, **NAMES, last_update=1, digest=digest)
    assert bare.reason == "UNKNOWN_UPDATE"
    assert "`samples` and `outcome`" in bare.message
    foreign = outcome | {"named": ("foreign",)}
    assert refusal(run, i.AttachTrainer, **NAMES, last_update=1, digest=digest, **foreign).reason == "UNKNOWN_UPDATE"
    attached: i.Attached = run.ask(i.AttachTrainer, **NAMES, last_update=1, digest=digest, **outcome)
    assert (attached.resolution, attached.next_update) == (m.AttachResolution.ROLLED_FORWARD, 2)
    (committed,) = [fact for fact in run.facts if isinstance(fact, f.UpdateCommitted)]
    assert (committed.used, committed.applied) == (tuple(rest) if applied else (), applied)
    again: i.Attached = run.ask(i.AttachTrainer, **NAMES, last_update=1, digest=digest, **outcome)
    assert (again.resolution, again.next_update) == (m.AttachResolution.CONTINUED, 2)


# The end --------------------------------------------------------------------------------------------------------------


def end_reasons(run: CoreRun) -> dict[str, int]:
    state = run.core.state
    assert state.counters.conserved
    return state.counters.reasons


@pytest.mark.parametrize("how", ["commit", "release", "expire", "attach", "in doubt before"])
def test_a_batch_that_is_held_at_the_end_is_committed_or_ends_with_the_run(how: str) -> None:
    run, batch = leased(batch_lease_s=5.0)
    if how == "in doubt before":
        run.now += 6.0
        run.take(run.core.handle(i.Tick(), run.now))
    run.ask(m.StopRun, reason="enough")
    assert run.core.state.counters.live == (0 if how == "in doubt before" else 4)
    if how == "commit":
        assert run.lease(1).lease_id == batch.lease_id
        run.checkpoint(1, run.commit(1, batch.lease_id))
    elif how == "release":
        run.ask(m.ReleaseBatch, **trainer(run, lease_id=batch.lease_id))
    elif how == "expire":
        run.now += 6.0
        run.take(run.core.handle(i.Tick(), run.now))
    elif how == "attach":
        run.attach()
    assert run.core.state.counters.live == 0
    assert end_reasons(run) == ({"trained": 4} if how == "commit" else {"cancelled/RUN_ENDED": 4})
    assert refusal(run, i.LeaseBatch, **trainer(run, update=run.core.state.the_clock.applied + 1)).reason == "RUN_ENDED"
    error = refusal(run, i.CommitUpdate, **trainer(run, update=run.core.state.the_clock.applied + 1, lease_ids=()))
    assert error.reason == "RUN_ENDED"


def test_a_checkpoint_with_the_batch_that_was_held_at_the_end_still_rolls_forward() -> None:
    run, batch = leased()
    run.ask(m.StopRun, reason="enough")
    attached: i.Attached = run.attach(1, next_digest("", 1, ids(batch)))
    assert attached.resolution is m.AttachResolution.ROLLED_FORWARD
    assert end_reasons(run) == {"trained": 4}


def test_samples_undone_after_the_end_do_not_stay_live() -> None:
    run, batch = leased()
    run.commit(1, batch.lease_id)
    run.ask(m.StopRun, reason="enough")
    run.attach(0)
    assert run.core.state.counters.live == 0
    assert end_reasons(run) == {"cancelled/RUN_ENDED": 4}


def test_a_run_that_a_bug_ended_leaves_nothing_live_and_decides_nothing() -> None:
    run, batch = leased(num=6)
    run.take(run.core.fail("ValueError: x", run.now))
    assert run.core.state.ended == "FAILED: ValueError: x"
    assert run.core.state.counters.live == 0
    assert refusal(run, i.CommitUpdate, **trainer(run, update=1, lease_ids=(batch.lease_id,))).reason == "RUN_ENDED"
    run.ask(m.StopRun, reason="")
    run.take(run.core.handle(i.Tick(), run.now))


def test_stopping_a_run_takes_time_in_proportion_to_its_episodes() -> None:
    run = CoreRun(group_size=8000, batch_groups=1, max_staleness=0)
    run.begin()
    run.ask(i.AcquireRollouts, node_id="w", num_max=2000, wait_s=1.0)
    began = time.process_time()
    run.ask(m.StopRun, reason="")
    took = time.process_time() - began
    assert run.core.state.counters.live == 0
    assert took < 1.0


# Reports --------------------------------------------------------------------------------------------------------------


def report_of(run: CoreRun, **changes: Any) -> tuple[str, str]:
    """Return the result of a changed report, and the episode's cause after it."""
    acquired: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=1, wait_s=1.0)
    (lease,) = acquired.leases
    span = StepSpan(step=changes.pop("step", 0), incarnation=changes.pop("incarnation", 0), num_tokens=1)
    reward = Reward(name="correct", value=changes.pop("value", 1.0), segment=-1, scorer="exact@1")
    meta = SampleMeta(
        sample_id=f"{lease.episode}.0",
        policy=changes.pop("policy", "main"),
        steps=(span,),
        num_tokens=6,
        rewards=(reward,),
        external=changes.pop("external", ()),
        trainable=changes.pop("trainable", True),
    )
    node_id = changes.pop("node_id", "w")
    values: dict[str, Any] = {
        "lease_id": lease.lease_id,
        "group": lease.group,
        "episode": lease.episode,
        "attempt": lease.attempt,
        "outcome": m.EpisodeOutcome.COMPLETED,
        "samples": (meta,),
    }
    report = i.EpisodeReport(**(values | changes))
    (result,) = run.ask(i.ReportEpisodes, node_id=node_id, reports=(report,)).results
    return result, run.core.state.groups[lease.group].episodes[lease.episode].cause


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"step": 3}, "no weights of step 3, incarnation 0 were published"),
        ({"step": -3}, "no weights of step -3"),
        ({"incarnation": 9}, "incarnation 9"),
        ({"incarnation": -1}, "incarnation -1"),
        ({"policy": "other"}, "`policy` must be that of the lease, 'main', got 'other'"),
        ({"invalid": "`samples[0].leaf` must be >= 0, got -1"}, "`samples[0].leaf` must be >= 0, got -1"),
    ],
)
def test_a_report_that_contradicts_the_run_is_a_failed_attempt(changes: dict[str, Any], why: str) -> None:
    run = CoreRun()
    run.begin()
    result, cause = report_of(run, **changes)
    assert result.startswith("INVALID_REPORT: ")
    assert why in result
    assert why in cause
    assert run.core.state.counters.live == run.core.state.counters.reserved


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.7e308, 1.1e30])
def test_a_reward_without_a_finite_mean_is_an_infra_failure(value: float) -> None:
    run = CoreRun()
    run.begin()
    why = f"scorer exact@1: reward 'correct' is {value}, expected a number in [-1e+30, 1e+30]"
    assert report_of(run, value=value) == ("", why)


@pytest.mark.parametrize("admitted", [(), ("dataset",), ("dataset", "peer")])
@pytest.mark.parametrize("trainable", [True, False])
def test_trained_tokens_of_a_source_that_the_run_does_not_admit_are_rejected(
    admitted: tuple[ExternalSource, ...], trainable: bool
) -> None:
    run = CoreRun(external_sources=admitted)
    run.begin()
    spans = (
        ExternalSpan(source=SegmentSource.DATASET, num_tokens=3),
        ExternalSpan(source=SegmentSource.PEER, num_tokens=2),
    )
    result, _ = report_of(run, external=spans, trainable=trainable)
    missing = [name for name in ("dataset", "peer") if name not in admitted]
    if missing and trainable:
        assert f"tokens of source {missing[0]}, but `run.external_sources` is [{', '.join(admitted)}]" in result
    else:
        assert not result


def test_a_report_of_a_node_without_the_lease_is_not_recorded() -> None:
    run = CoreRun()
    run.begin()
    assert report_of(run, node_id="other") == ("UNKNOWN_LEASE", "")
    assert not [
        e for g in run.core.state.groups.values() for e in g.episodes.values() if e.status is EpisodeStatus.SCORED
    ]


def test_a_lease_names_the_attempt_that_stored_the_payload() -> None:
    _, batch = leased()
    for sample in batch.samples:
        assert sample.rewards_as_reported
        assert (sample.key.run, sample.key.group, sample.key.task) == ("r", sample.group, sample.task)
        assert sample.meta.sample_id.startswith(f"{sample.key.episode}.")
        assert sample.key.attempt == 1


def test_a_report_under_another_lease_is_not_recorded() -> None:
    run = CoreRun()
    run.begin()
    assert report_of(run, lease_id="g0.1#1") == ("UNKNOWN_LEASE", "")


def test_a_group_that_the_reward_service_cannot_decide_on_ends_with_the_cause() -> None:
    run = CoreRun()
    run.begin()
    run.generate(1, step=0)
    (group,) = [g for g in run.core.state.groups.values() if g.samples]
    group.phase = GroupPhase.FINALIZING
    decision = run.core.handle(i.FinalizeFailed(group=group.group, cause="scorer: it broke"), run.now)
    (ended,) = [fact for fact in decision.facts if isinstance(fact, f.SamplesEnded)]
    assert (ended.end, ended.reason) == (SampleEnd.FAILED, "NOT_FINALIZED")
    (letter,) = [effect for effect in decision.effects if isinstance(effect, DeadLetter)]
    assert (letter.cause, letter.purpose) == ("scorer: it broke", Purpose.TRAIN)
    late = run.core.handle(i.FinalizeFailed(group="g99", cause=""), run.now)
    assert not late.facts
    run.core.handle(i.GroupDecided(group="g99", decision=GroupDecision.KEEP), run.now)


# Specs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds_max": float("nan")},
        {"stall_s": float("nan")},
        {"batch_lease_s": float("inf")},
        {"episode_lease_s": 1e308},
        {"group_s_max": 5e-324},
        {"eval_s_max": float("inf")},
        {"batch_groups": 2**62},
        {"max_staleness": 2**62},
        {"tries_max": 2**62},
        {"learner": "x" * 100_000},
        {"success_reward": "x" * 65},
        {"max_staleness": 1023, "batch_groups": 64, "group_size": 16},
    ],
    ids=str,
)
def test_a_number_that_no_run_can_work_with_is_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes) if len(changes) == 1 else iter(["batch_groups"]))):
        RunSpec(run="r", **changes)


def test_a_batch_has_the_text_of_a_sample_once_in_its_group() -> None:
    run = CoreRun()
    run.begin()
    run.generate(4, step=0, summary=SampleSummary(role="critic", text="so 63"))
    batch = run.lease(1)
    assert [s.meta.summary for s in batch.samples] == [SampleSummary(role="critic")] * 4
    members = [m.summary for group in batch.groups for m in group.members]
    assert members == [SampleSummary(role="critic", text="so 63")] * 4


def test_an_error_shows_where_two_digests_differ() -> None:
    run, batch = leased()
    known = run.commit(1, batch.lease_id)
    other = known[:-1] + ("0" if known[-1] != "0" else "1")
    for kind, fields in (
        (m.ReportCheckpoint, trainer(run, update=1, digest=other)),
        (i.AttachTrainer, {"policy": "main", "learner": "main", "last_update": 1, "digest": other}),
    ):
        error = refusal(run, kind, **fields)
        assert error.reason == "DIGEST_MISMATCH"
        assert known in str(error)
        assert other in str(error)
