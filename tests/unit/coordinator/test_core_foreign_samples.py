"""Submitted samples in the core: each group once, in its own account, within the bound and the share of its source."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from msgspec import structs

from rollmesh.services.coordinator.audit import Audit
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import foreign_samples
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.facts import (
    ExternalSpan,
    Message,
    PayloadRef,
    Reward,
    SampleEnd,
    SampleMeta,
    SegmentSource,
    StepSpan,
    SubmittedGroup,
    Task,
)
from rollmesh.services.coordinator.core.records import ForeignSource, ReplaySpec
from rollmesh.services.coordinator.core.state import SourceAccount
from rollmesh.services.coordinator.snapshots import encode_state
from rollmesh.shared.config.settings import SettingError
from rollmesh.shared.errors import BeyondBound, InvalidInput, RunEnded, SampleConflict, SampleQuota, SamplesNotAccepted

from .core_run import NAMES, CoreRun

LIMITS = i.SubmissionLimits(total_max=100, waiting_max=10, waiting_bytes_max=10_000)
PEER = SegmentSource.PEER


def peer(**fields: Any) -> ForeignSource:
    values: dict[str, Any] = {"source": "peer", "max_age": "unlimited", "share": 0.5}
    return ForeignSource(**(values | fields))


def begun(*sources: ForeignSource, **spec: Any) -> CoreRun:
    given = sources or (peer(),)
    run = CoreRun(**({"foreign": given, "external_sources": tuple(one.source for one in given)} | spec))
    run.begin()
    return run


def group(key: str, num: int = 2, text: str = "a") -> SubmittedGroup:
    task = Task(task_id=f"task-{key}", messages=(Message(role="user", content="1+1?"),))
    return SubmittedGroup(key=key, task=task, episodes=tuple(f"{text}{n}".encode() for n in range(num)))


def submit(
    run: CoreRun, *groups: SubmittedGroup, source: SegmentSource = PEER, **fields: Any
) -> m.SubmitSamplesResponse:
    values: dict[str, Any] = {"submission": f"{len(run.records) + 1}-ab", "limits": LIMITS}
    reply: m.SubmitSamplesResponse = run.ask(i.SubmitSamples, source=source, groups=groups, **(values | fields))
    return reply


_payloads = itertools.count(1000)


def roll(run: CoreRun, num: int, *, step: int = 0, equal: bool = False) -> dict[str, i.EpisodeLease]:
    """Lease and finish at most `num` episodes, those of submitted samples with tokens of their source. Return the
    leases."""
    found: dict[str, i.EpisodeLease] = {}
    idle = 0  # the first request without leases may draw tasks
    while len(found) < num and idle < 2:
        acquired: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=num - len(found), wait_s=0.0)
        idle = 0 if acquired.leases else idle + 1
        found |= {lease.episode: lease for lease in acquired.leases}
        reports = [report_of(lease, scored(lease, step, equal)) for lease in acquired.leases]
        run.ask(i.ReportEpisodes, node_id="w", reports=tuple(reports))
    return found


def scored(lease: i.EpisodeLease, step: int, equal: bool) -> SampleMeta:
    given = (ExternalSpan(source=SegmentSource[lease.given_source.upper()], num_tokens=3),) if lease.given else ()
    return SampleMeta(
        sample_id=f"{lease.episode}.0",
        policy="main",
        steps=() if lease.given else (StepSpan(step=step, num_tokens=4),),
        external=given,
        num_tokens=8,
        num_sampled_tokens=0 if lease.given else 4,
        rewards=(Reward(name="correct", value=0.0 if equal else float(lease.index), segment=-1, scorer="exact@1"),),
    )


def report_of(lease: i.EpisodeLease, meta: SampleMeta) -> i.EpisodeReport:
    return i.EpisodeReport(
        lease_id=lease.lease_id,
        group=lease.group,
        episode=lease.episode,
        attempt=lease.attempt,
        outcome=m.EpisodeOutcome.COMPLETED,
        payload=PayloadRef(sequence=next(_payloads), size_bytes=10),
        samples=(meta,),
    )


def account(run: CoreRun, source: str = "peer") -> SourceAccount:
    return run.core.state.foreign[source]


def train(run: CoreRun, update: int) -> list[str]:
    """Train an update. Return the groups of its batch."""
    batch = run.lease(update)
    assert batch.lease_id, batch.waiting_for
    run.commit(update, batch.lease_id)
    run.publish(update)
    return [one.group for one in batch.groups]


def check_ledger(run: CoreRun) -> None:
    """A fold of the ledger gives the same state, and the audit holds."""
    folded = Core()
    audit = Audit()
    for record in run.records:
        folded.replay(record.facts)
        audit.enter(record)
    assert encode_state(folded.state) == encode_state(run.core.state)
    report = audit.report()
    assert report.holds, report.to_text()
    assert run.core.state.counters.conserved
    assert all(one.counters.conserved for one in run.core.state.foreign.values())


def test_a_group_is_replayed_and_trained_in_the_account_of_its_source() -> None:
    run = begun()
    assert submit(run, group("a")).submitted == m.SubmittedSamples(source="peer", groups=1, waiting=1)
    leases = roll(run, 4)
    assert [(one.given, one.given_source, one.submitted) for one in leases.values()] == [
        (b"a0", "peer", True), (b"a1", "peer", True), (b"", "", False), (b"", "", False),
    ]  # fmt: skip
    assert sorted(train(run, 1)) == ["g0", "g1"]
    run.checkpoint(1, run.core.state.the_clock.digest)
    assert account(run).counters.reasons == {"trained": 2}
    assert account(run).trained_by_age == {0: 2}
    assert account(run).tokens_trained == 6
    assert run.core.state.counters.reasons == {"trained": 2}, "the samples of the policy"
    assert run.core.state.the_clock.trained_by_staleness == {0: 2}
    assert run.core.state.the_clock.tokens_generated == 8
    check_ledger(run)


def test_the_same_content_is_added_once_and_other_content_is_rejected() -> None:
    run = begun()
    assert submit(run, group("a"), group("b")).num_added == 2
    assert submit(run, group("b"), group("a"), group("c")).num_added == 1
    roll(run, 8)
    assert submit(run, group("a")).num_added == 0, "also after its admission"
    with pytest.raises(SampleConflict, match="`a`") as caught:
        submit(run, group("d"), group("a", text="other"))
    assert caught.value.metadata["key"] == "a"
    assert "d" not in run.core.state.foreign_keys
    check_ledger(run)


def test_a_source_without_a_written_bound_is_rejected() -> None:
    run = begun()
    with pytest.raises(
        SamplesNotAccepted, match=r"no submitted samples of source dataset.*`run\.foreign` has no bound"
    ):
        submit(run, group("a"), source=SegmentSource.DATASET)
    with pytest.raises(TypeError, match="max_age"):
        ForeignSource(source="peer", share=0.5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("sources", "external", "field"),
    [
        ((peer(),), (), "foreign[0].source"),
        ((peer(share=0.4),), ("peer",), "foreign[0].share"),
        ((peer(), peer()), ("peer",), "foreign[0].source"),
        ((peer(), peer(source="human", share=0.6)), ("peer", "human"), "foreign"),
    ],
)
def test_bad_bounds_are_rejected(sources: tuple[ForeignSource, ...], external: tuple[str, ...], field: str) -> None:
    with pytest.raises(SettingError) as caught:
        CoreRun(foreign=sources, external_sources=external)
    assert caught.value.field == field
    for wrong in ("-1", "soon", -1):
        with pytest.raises(ValueError, match="max_age"):
            peer(max_age=wrong)


@pytest.mark.row("S010", missing="with whole meshes")
def test_a_batch_has_at_most_the_share_and_rollouts_always_have_room() -> None:
    run = begun(batch_groups=4, max_staleness=0, group_size=1)
    submit(run, *(group(f"k{n}") for n in range(6)))
    for update in (1, 2, 3):
        roll(run, 16, step=update - 1)
        foreign = [name for name in train(run, update) if _source_of(run, name)]
        assert len(foreign) == 2
    assert run.core.state.foreign_waiting == {}
    roll(run, 16, step=3)
    assert [name for name in train(run, 4) if _source_of(run, name)] == [], (
        "without a peer, nothing but the pool changes"
    )
    check_ledger(run)


def test_a_smaller_batch_has_its_share_and_no_more() -> None:
    run = begun(batch_groups=4, max_staleness=0, group_size=1)
    submit(run, group("a"), group("b"))
    roll(run, 16)
    batch: m.LeaseBatchResponse = run.ask(i.LeaseBatch, **NAMES, trainer_epoch=run.epoch, update=1, amount=2)
    assert [_source_of(run, one.group) for one in batch.groups] == ["a", ""], "b waits, and the next own group is taken"


@pytest.mark.parametrize(
    ("unit", "amount"), [(i.GeometryUnit.SAMPLES, 8), (i.GeometryUnit.TOKENS, 24), (i.GeometryUnit.GROUPS, 1)]
)
def test_a_group_larger_than_its_share_of_a_batch_is_the_only_one_of_its_source(
    unit: i.GeometryUnit, amount: int
) -> None:
    run = begun(batch_groups=4, max_staleness=0)
    submit(run, group("a", num=8), group("b", num=8))  # the share is 4 samples, 12 tokens, or half a group
    roll(run, 20)
    batch: m.LeaseBatchResponse = run.ask(
        i.LeaseBatch, **NAMES, trainer_epoch=run.epoch, update=1, unit=unit, amount=amount
    )
    assert [_source_of(run, one.group) for one in batch.groups] == ["a"]
    wide: m.LeaseBatchResponse = batched(run, batch.lease_id, i.GeometryUnit.SAMPLES, 10)
    assert [_source_of(run, one.group) for one in wide.groups] == ["a", ""], "b waits for a later batch"


def batched(run: CoreRun, lease_id: str, unit: i.GeometryUnit, amount: int) -> m.LeaseBatchResponse:
    """Return a batch in another geometry in place of a lease."""
    run.ask(m.ReleaseBatch, **NAMES, trainer_epoch=run.epoch, lease_id=lease_id)
    reply: m.LeaseBatchResponse = run.ask(
        i.LeaseBatch, **NAMES, trainer_epoch=run.epoch, update=1, unit=unit, amount=amount
    )
    return reply


def _source_of(run: CoreRun, name: str) -> str:
    return next(fact.submitted_key for fact in run.facts if isinstance(fact, f.GroupReserved) and fact.group == name)


@pytest.mark.row("S010", missing="with whole meshes")
def test_equal_rewards_end_a_group_before_a_batch_unless_the_source_keeps_them() -> None:
    run = begun(max_staleness=0, submitted_tasks=True)
    submit(run, group("a"), group("b", num=1))
    roll(run, 2, equal=True)
    assert run.lease(1).waiting_for, "the update does not begin"
    roll(run, 2, equal=True)
    assert account(run).counters.reasons == {"filtered/ZERO_VARIANCE": 2}
    assert [one.group for one in run.core.state.groups.values()] == ["g1"], (
        "a lone episode has no group to compare with"
    )
    assert run.core.state.the_clock.applied == 0
    keeping = begun(peer(keep_equal=True))
    submit(keeping, group("a"))
    roll(keeping, 2, equal=True)
    assert account(keeping).counters.reasons == {}
    check_ledger(run)


def test_samples_beyond_the_age_are_stale_and_waiting_ones_are_dropped() -> None:
    run = begun(peer(max_age=0), max_staleness=2, batch_groups=2)
    submit(run, group("a"), group("b"))
    roll(run, 2)  # only "a" is admitted: one group may be ahead of its batch
    run.ask(i.AcquireRollouts, node_id="w", num_max=1, wait_s=1.0)
    assert run.core.state.groups["g0"].phase.name == "READY"
    batch = run.lease(1)
    assert not batch.lease_id
    roll(run, 4)
    assert "g0" in train(run, 1)
    assert run.core.state.foreign_waiting == {}
    assert account(run).dropped == 1, "b was submitted at step 0, and update 2 is one later"
    submit(run, group("c"))
    roll(run, 8, step=1)
    run.ask(m.ChangeRun, spec=structs.replace(run.core.state.the_spec, foreign=()), changes=(), change_id="x")
    train(run, 2)
    assert account(run).counters.reasons["stale/NOT_ACCEPTED"] == 2
    check_ledger(run)


def test_the_bound_of_the_lease_holds_at_the_commit() -> None:
    run = begun(peer(max_age=0), max_staleness=2)
    submit(run, group("a"))
    roll(run, 4)
    batch = run.lease(1)
    name = next(one.group for one in batch.groups if _source_of(run, one.group))
    run.core.state.groups[name].submitted_step = -5  # as no ledger can have it
    with pytest.raises(BeyondBound, match="BEYOND_AGE"):
        run.commit(1, batch.lease_id)


def test_a_report_that_contradicts_the_source_is_a_failed_attempt() -> None:
    run = begun()
    submit(run, group("a", num=1))
    acquired: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=1, wait_s=1.0)
    (lease,) = acquired.leases
    sampled = SampleMeta(sample_id=f"{lease.episode}.0", policy="main", steps=(StepSpan(num_tokens=4),), num_tokens=8)
    reply = run.ask(i.ReportEpisodes, node_id="w", reports=(report_of(lease, sampled),))
    assert "all trained tokens must be of source peer, got policy" in reply.results[0]
    retried: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=1, wait_s=1.0)
    assert retried.leases[0].given == b"a0"
    check_ledger(run)


def test_a_roll_back_moves_the_lost_samples_in_their_account() -> None:
    run = begun()
    submit(run, group("a"))
    roll(run, 4)
    batch = run.lease(1)
    digest = run.commit(1, batch.lease_id)
    run.checkpoint(1, digest)
    assert account(run).counters.ends == {SampleEnd.TRAINED: 2}
    run.ask(i.AttachTrainer, **NAMES, last_update=0, digest="")
    assert account(run).counters.ends == {SampleEnd.TRAINED: 0, SampleEnd.STALE: 2}
    check_ledger(run)


def test_quotas_and_the_end_of_the_run() -> None:
    run = begun()
    with pytest.raises(SampleQuota, match="never wait for admission together") as caught:
        submit(run, *(group(f"k{n}") for n in range(11)))
    assert not caught.value.retryable
    assert caught.value.metadata["groups_per_call"] == "10"
    submit(run, *(group(f"k{n}") for n in range(6)))
    with pytest.raises(SampleQuota, match="waiting_max") as caught:
        submit(run, *(group(f"l{n}") for n in range(5)))
    assert caught.value.retry_after_s
    run = begun()
    small = i.SubmissionLimits(total_max=1, waiting_max=10, waiting_bytes_max=10_000)
    submit(run, group("a"), limits=small)
    with pytest.raises(SampleQuota, match="groups_max") as caught:
        submit(run, group("b"), limits=small)
    assert not caught.value.retryable
    with pytest.raises(SampleQuota, match="ledger"):
        submit(
            run,
            group("b"),
            limits=i.SubmissionLimits(total_max=9, waiting_max=9, waiting_bytes_max=9, ledger_bytes_left=3),
        )
    run.ask(m.StopRun, reason="")
    assert submit(run, group("a")).num_added == 0
    with pytest.raises(RunEnded):
        submit(run, group("c"))
    check_ledger(run)


def test_a_finite_run_ends_after_its_submitted_samples() -> None:
    run = begun(submitted_tasks=True, max_staleness=0, batch_groups=2)
    submit(run, group("a"))
    finish(run)
    assert run.core.state.stopping == ""
    roll(run, 2)
    assert train(run, 1) == ["g0"], "a share of 0.5 would leave it waiting for groups that cannot come"
    assert run.core.state.stopping == "TASKS_EXHAUSTED"
    check_ledger(run)


def finish(run: CoreRun) -> None:
    """Declare that no task follows."""
    run.ask(
        i.SubmitTasks, submission="x", tasks=(), answer_keys=(), finish=True,
        limits=i.SubmissionLimits(total_max=1, waiting_max=1, waiting_bytes_max=1),
    )  # fmt: skip


def test_a_finite_run_trains_more_submitted_groups_than_the_share_of_a_batch() -> None:
    run = begun(submitted_tasks=True, max_staleness=0, batch_groups=2)
    submit(run, *(group(name) for name in "abc"))
    finish(run)
    trained = []
    for update in (1, 2, 3):
        roll(run, 2, step=update - 1)
        trained += train(run, update)
    assert trained == ["g0", "g1", "g2"], "groups that wait for room do not hold back the batch that makes it"
    assert run.core.state.stopping == "TASKS_EXHAUSTED"
    check_ledger(run)


def test_a_run_whose_tasks_are_exhausted_ends_although_submitted_groups_wait_for_room() -> None:
    run = begun(max_staleness=0, batch_groups=4)
    submit(run, *(group(f"k{n}") for n in range(6)))
    run.core.ephemeral.exhausted = True  # as the data service said
    roll(run, 4)
    assert len(run.core.state.foreign_waiting) == 4
    run.lease(1)
    assert run.core.state.ended == "TASKS_EXHAUSTED"


def test_a_run_that_waits_for_tasks_and_for_room_is_not_stalled() -> None:
    run = begun(submitted_tasks=True, max_staleness=0, batch_groups=4)
    submit(run, *(group(f"k{n}") for n in range(6)))
    roll(run, 4)
    run.lease(1)
    run.now = 10 * run.core.state.the_spec.stall_s
    assert len(run.core.state.foreign_waiting) == 4
    assert not run.core.is_stalled(run.now), "only clients can submit what fills the batch"


def test_shares_are_of_the_groups_that_the_replay_log_does_not_draw() -> None:
    log = ReplaySpec(share=0.5, priority="fifo", max_staleness="unlimited")
    run = begun(max_staleness=0, batch_groups=8, group_size=1, replay=log)
    submit(run, *(group(f"k{n}") for n in range(10)))
    for update in (1, 2):
        roll(run, 16, step=update - 1)
        batch = train(run, update)
        assert [bool(_source_of(run, name)) for name in batch if name.startswith("g")].count(True) == 2
    with pytest.raises(SettingError, match="one of the 4 groups of a batch that are fresh") as caught:
        begun(peer(share=0.2), batch_groups=8, replay=log)
    assert caught.value.field == "foreign[0].share"


def test_a_decision_judges_waiting_groups_only_after_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(max_staleness=0, group_size=1)
    submit(run, *(group(f"k{n}") for n in range(9)))
    judged = []

    def young(ctx: object, source: str, step: int) -> str:
        judged.append(step)
        return ""

    monkeypatch.setattr(foreign_samples, "why_refused", young)
    roll(run, 8)
    assert judged == []
    train(run, 1)
    assert len(judged) == 8


def test_a_group_larger_than_one_of_rollouts_can_become_is_rejected() -> None:
    run = begun()
    with pytest.raises(InvalidInput, match=r"at most 8 per group, 4 \* run\.group_size, got 9 in group a"):
        submit(run, group("a", num=9))
    assert submit(run, group("a", num=8)).num_added == 1
