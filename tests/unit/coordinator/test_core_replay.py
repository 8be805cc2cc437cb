"""Replayed samples are new samples with the versions of their originals, a separate bound, and a separate account."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rollmesh.services.coordinator.audit_history import sample_history
from rollmesh.services.coordinator.core import facts as f
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core import replay as replay_decisions
from rollmesh.services.coordinator.core.core import Decision
from rollmesh.services.coordinator.core.decision_context import DrawTasks
from rollmesh.services.coordinator.core.facts import DroppedSample, SampleEnd
from rollmesh.services.coordinator.core.records import UNLIMITED, ReplaySpec
from rollmesh.services.coordinator.core.state import GroupPhase, SampleCounters
from rollmesh.services.coordinator.run_state import run_state
from rollmesh.shared.domain.ledger_head import EMPTY
from rollmesh.shared.errors import BeyondBound

from .core_run import NAMES, CoreRun
from .test_audit import audit, broken, doctored

replace = msgspec.structs.replace


class Replaying(CoreRun):
    """A run of 4 groups of 2 per update, with the rewards 1 and 0."""

    def __init__(self, **replay: Any) -> None:
        values: dict[str, Any] = {"max_staleness": 4, "share": 0.5, "capacity_groups": 8} | replay
        super().__init__(batch_groups=4, group_size=2, max_staleness=1, replay=ReplaySpec(**values))
        self.begin()

    def reward(self, episode: str) -> float:
        return float(episode.endswith(".0"))

    def batch(self, update: int) -> m.LeaseBatchResponse:
        """Generate until the batch of an update is leased."""
        if len(self.core.state.training_groups(GroupPhase.READY)) < 4:
            self.generate(16, step=update - 1)
        return self.lease(update)

    def finish(self, update: int, lease: m.LeaseBatchResponse) -> None:
        self.checkpoint(update, self.commit(update, lease.lease_id))
        self.publish(update)

    def step(self, update: int) -> m.LeaseBatchResponse:
        lease = self.batch(update)
        self.finish(update, lease)
        return lease


def replayed(lease: m.LeaseBatchResponse) -> dict[str, str]:
    """Return the originals of the replayed samples of a batch."""
    return {sample.meta.sample_id: sample.replay_of for sample in lease.samples if sample.replay_of}


def fresh(lease: m.LeaseBatchResponse) -> set[str]:
    return {sample.group for sample in lease.samples if not sample.replay_of}


def conserved(run: CoreRun) -> SampleCounters:
    state = run.core.state
    assert state.counters.conserved
    assert state.replay.counters.conserved
    return state.replay.counters


def test_a_share_of_a_batch_is_trained_again() -> None:
    run = Replaying()
    first, second = run.step(1), run.batch(2)
    assert len(first.samples) == 4, "the log is empty, and admission prepares the fresh half only"
    assert len(fresh(second)) == 2
    assert replayed(second) == {"r0.0": "g0.0.0", "r0.1": "g0.1.0", "r1.0": "g1.0.0", "r1.1": "g1.1.0"}
    original = {sample.meta.sample_id: sample for sample in first.samples}
    for sample in second.samples:
        if sample.replay_of:
            before = original[sample.replay_of]
            assert sample.meta == replace(before.meta, sample_id=sample.meta.sample_id)
            assert (sample.key, sample.payload) == (before.key, before.payload)
            assert (sample.staleness, sample.rewards_as_reported) == (1, True)
    groups = {group.group: group for group in second.groups}
    assert [member.end for member in groups["r0"].members] == ["ready", "ready"]
    assert groups["r0"].task == "t0"
    run.finish(2, second)
    counters = conserved(run)
    assert (counters.reserved, counters.ends) == (4, {SampleEnd.TRAINED: 4})
    assert run.core.state.counters.ends[SampleEnd.TRAINED] == 8, "in their own account"
    assert run.core.state.the_clock.trained_by_staleness == {0: 4, 1: 4}
    state = run_state(run.core, EMPTY)
    assert dict(state.replay.trained_by_staleness) == {1: 4}
    assert (state.replay.tokens_trained, state.policies[0].tokens_trained) == (16, 32)
    assert (state.replay.groups, state.replay.log_samples, state.replay.samples.trained) == (4, 8, 4)
    report = audit(run.records)
    assert report.holds, report.to_text()
    assert "replayed      bound 4; samples used by staleness: 1: 4" in report.to_text()


@pytest.mark.row("S052", missing="the selection by predicted difficulty")
def test_half_of_the_groups_are_generated_at_a_share_of_one_half() -> None:
    run = Replaying(max_staleness=UNLIMITED)
    for update in range(1, 9):
        lease = run.step(update)
        assert len(fresh(lease)) == 2
        assert len(replayed(lease)) == (4 if update > 1 else 0)
    generated = run.core.state.num_groups
    assert generated <= 8 * 2 + 2 * 2, "2 groups per update and at most 2 updates ahead, in place of 4"


def test_the_same_seed_chooses_the_same_groups() -> None:
    def chosen(seed: int) -> list[str]:
        run = Replaying()
        run.core.state.spec = replace(run.core.state.the_spec, seed=seed)
        return [group for update in range(1, 6) for group in replayed(run.step(update)).values()]

    assert chosen(1) == chosen(1)
    assert chosen(1) != chosen(2)


def test_a_sample_beyond_the_replay_bound_is_not_chosen_and_leaves_the_log() -> None:
    run = Replaying(max_staleness=2, capacity_groups=100)
    for update in range(1, 8):
        lease = run.step(update)
        assert max((s.staleness for s in lease.samples if s.replay_of), default=0) <= 2
        steps = {
            e.group.samples[n].meta.steps[0].step for e in run.core.state.replay.entries.values() for n in e.sample_ids
        }
        assert min(steps) >= update - 2 - 1
    assert audit(run.records).holds


def test_a_batch_that_is_returned_keeps_its_replayed_samples_for_the_next_one() -> None:
    run = Replaying()
    run.step(1)
    lease = run.batch(2)
    run.ask(m.ReleaseBatch, **NAMES, trainer_epoch=run.epoch, lease_id=lease.lease_id)
    again = run.lease(2)
    assert replayed(again) == replayed(lease)
    assert again.lease_id != lease.lease_id


def test_the_bound_of_a_replayed_sample_is_checked_again_at_the_commit() -> None:
    run = Replaying()
    run.step(1)
    lease = run.batch(2)
    group = run.core.state.groups["r0"]
    old = tuple(replace(span, step=-9) for span in group.samples["r0.0"].meta.steps)
    group.samples["r0.0"].meta = replace(group.samples["r0.0"].meta, steps=old)
    with pytest.raises(BeyondBound, match="first r0.0: BEYOND_BOUND"):
        run.commit(2, lease.lease_id)


def test_a_roll_back_returns_replayed_samples_and_voids_trained_ones() -> None:
    run = Replaying()
    first = run.commit(1, run.batch(1).lease_id)
    run.checkpoint(1, first)
    run.publish(1)
    run.finish(2, run.batch(2))
    applied = run.batch(3)
    assert replayed(applied)
    run.commit(3, applied.lease_id)
    run.attach(1, first)
    counters = conserved(run)
    assert counters.ends == {SampleEnd.TRAINED: 0, SampleEnd.STALE: 4}
    assert counters.live == 4
    assert [g.group for g in run.core.state.replayed_groups(GroupPhase.READY)] == ["r2", "r3"]
    versions = {s.meta.steps[0].step for e in run.core.state.replay.entries.values() for s in e.group.samples.values()}
    assert versions <= {0, 1}, "weights that were undone are not replayed"
    run.publish(1, incarnation=1)
    lease = run.lease(2)
    assert set(replayed(lease)) == {"r2.0", "r2.1", "r3.0", "r3.1"}
    run.commit(2, lease.lease_id)
    report = audit(run.records)
    assert report.holds, report.to_text()


def test_a_dropped_member_is_in_the_baseline_of_a_replay_and_is_not_trained() -> None:
    run = Replaying()
    lease = run.batch(1)
    dropped = (DroppedSample(sample_id="g0.0.0", reason="TOO_LONG"),)
    committed = run.ask(
        i.CommitUpdate,
        **NAMES,
        trainer_epoch=run.epoch,
        update=1,
        lease_ids=(lease.lease_id,),
        dropped=dropped,
        named=("g0.0.0",),
    )
    run.checkpoint(1, committed.digest)
    run.publish(1)
    second = run.batch(2)
    assert "g0.0.0" not in replayed(second).values()
    (group,) = [group for group in second.groups if group.task == "t0"]
    assert [(member.sample_id, member.end) for member in group.members] == [
        ("g0.0.0", "filtered/TOO_LONG"),
        ("r0.0", "ready"),
    ]


# Priorities -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("S065")
def test_groups_without_an_advantage_are_replaced_by_the_log() -> None:
    """60 % of the fresh groups have equal rewards; every trained group has different ones."""

    class Vanishing(Replaying):
        def reward(self, episode: str) -> float:
            group = int(episode.split(".")[0].removeprefix("g"))
            return 1.0 if group >= 4 and group % 5 < 3 else float(episode.endswith(".0"))

    run = Vanishing(priority="advantage", share=0.75, max_staleness=UNLIMITED)
    for update in range(1, 7):
        lease = run.batch(update)
        assert len(lease.groups) == 4
        for group in lease.groups:
            assert {member.rewards[0].value for member in group.members} == {0.0, 1.0}
        run.finish(update, lease)
    reasons = run.core.state.counters.reasons
    assert reasons["filtered/VANISHED_ADVANTAGE"] > 0
    assert conserved(run).ends[SampleEnd.TRAINED] > 0
    assert audit(run.records).holds


def test_the_reported_advantage_orders_the_log() -> None:
    run = Replaying(priority="advantage", share=0.25)
    lease = run.batch(1)
    groups = tuple(
        f.TrainedGroup(group=f"g{number}", mean_abs_advantage=value, num_tokens=4)
        for number, value in enumerate((0.25, 0.0, 0.75, 0.5))
    )
    committed = run.ask(
        i.CommitUpdate, **NAMES, trainer_epoch=run.epoch, update=1, lease_ids=(lease.lease_id,), groups=groups
    )
    run.checkpoint(1, committed.digest)
    run.publish(1)
    log = run.core.state.replay
    assert {name: entry.advantage for name, entry in log.entries.items()} == {"g0": 0.25, "g2": 0.75, "g3": 0.5}
    state = run_state(run.core, EMPTY).replay
    assert (state.groups, state.oldest_step, state.mean_abs_advantage) == (3, 0, 0.5), (
        "age and priority are inspectable"
    )
    log.vanished = 3
    assert set(replayed(run.batch(2)).values()) == {"g2.0.0", "g2.1.0"}, "one group of 4 at a share of one quarter"


class OneTask(Replaying):
    """All groups are of one task, or of `num_tasks`. The first group of each succeeds, and no other one."""

    num_tasks = 1

    def take(self, decision: Any) -> dict[int, Any]:
        effects = tuple(e for e in decision.effects if not isinstance(e, DrawTasks))
        replies = super().take(Decision(decision.facts, effects))
        for effect in (e for e in decision.effects if isinstance(e, DrawTasks)):
            draws = range(effect.first_draw, effect.first_draw + effect.num)
            tasks = tuple((draw, f.Task(task_id=f"t{draw % self.num_tasks}")) for draw in draws)
            replies |= self.take(self.core.handle(i.TasksDrawn(purpose=effect.purpose, tasks=tasks), self.now))
        return replies

    def reward(self, episode: str) -> float:
        return float(episode in [f"g{number}.0" for number in range(self.num_tasks)])


class FourTasks(OneTask):
    num_tasks = 4


@pytest.mark.row("S067", missing="pruned prompts, labels of tool calls")
@pytest.mark.row("S008", missing="updates of single workers, idle environments")
@pytest.mark.parametrize("after_groups", [1, 5])
def test_a_group_without_a_success_gets_the_stored_one_of_its_task(after_groups: int) -> None:
    """RAPO: a group that fails entirely gets one. DART: the group after `after_groups` - 1 failed ones does. A batch
    has it once."""
    run = OneTask(priority="success_per_task", share=0.5, options={"after_groups": float(after_groups)})
    first = run.step(1)
    assert not replayed(first), "the success is its own"
    second = run.batch(2)
    assert len(second.groups) == 4
    assert list(replayed(second).values()) == ["g0.0.0"]
    first_group, *others = second.groups
    assert [member.rewards[0].value for member in first_group.members] == [0.0, 0.0, 1.0], (
        "in the baseline of the group"
    )
    assert first_group.members[-1].episode == "g0.0"
    assert all(len(group.members) == 2 for group in others)
    run.finish(2, second)
    assert conserved(run).ends == {SampleEnd.TRAINED: 1}
    assert list(run.core.state.replay.entries) == ["g0"], "a replayed success is not stored again"
    report = audit(run.records)
    assert report.holds, report.to_text()


def test_successes_fill_at_most_their_share() -> None:
    run = FourTasks(priority="success_per_task", share=0.25)
    run.step(1)
    assert len(replayed(run.batch(2))) == 2, "a quarter of 8 samples"


@pytest.mark.row("S050")
@pytest.mark.parametrize("extra_updates", [1.0, 0.0])
def test_deferred_samples_are_trained_once_in_an_extra_update(extra_updates: float) -> None:
    options = {"alpha": 0.5, "extra_updates": extra_updates}
    run = Replaying(priority="compensation", share=1.0, capacity_groups=8, max_staleness=UNLIMITED, options=options)
    trained: list[str] = []
    extra = []
    for update in range(1, 9):
        lease = run.batch(update)
        trained += [sample.replay_of or sample.meta.sample_id for sample in lease.samples]
        if replayed(lease):
            assert len(replayed(lease)) == len(lease.samples), "nothing of it is fresh"
            extra.append(update)
        else:
            assert len(lease.samples) == 4, "half of 8 samples"
        run.finish(update, lease)
    assert len(trained) == len(set(trained)), "every sample is trained at most once"
    assert extra == ([4, 7] if extra_updates else [])
    assert run.core.state.counters.reasons["filtered/DEFERRED"] > 0
    report = audit(run.records)
    assert report.holds, report.to_text()


def test_deferred_samples_are_trained_before_their_bound() -> None:
    """The log never has 64 groups, because the bound of 8 would remove them first."""
    run = Replaying(priority="compensation", share=1.0, capacity_groups=64, max_staleness=8, options={"alpha": 0.5})
    for update in range(1, 25):
        run.step(update)
    state = run.core.state
    waiting = sum(len(entry.sample_ids) for entry in state.replay.entries.values())
    trained = conserved(run).ends[SampleEnd.TRAINED]
    assert trained > 0
    assert trained + waiting == state.counters.reasons["filtered/DEFERRED"]
    assert state.replay.left == {}


class Dropping(Replaying):
    """A run whose finalizer drops the second member of every group under the words of a lease."""

    word = "DEFERRED"

    def decide(self, group: str) -> i.GroupDecided:
        return i.GroupDecided(group=group, decision=f.GroupDecision.KEEP, dropped={f"{group}.1.0": self.word})


@pytest.mark.parametrize("replay", [{}, {"priority": "compensation", "share": 1.0, "options": {"alpha": 1.0}}])
def test_what_a_finalizer_drops_is_not_deferred(replay: dict[str, Any]) -> None:
    run = Dropping(**replay)
    run.batch(1)
    assert run.core.state.counters.reasons["filtered/DEFERRED"] > 0
    assert run.core.state.replay.entries == {}


def test_a_group_that_a_finalizer_drops_is_not_replaced() -> None:
    class Vanishing(Dropping):
        word = "VANISHED_ADVANTAGE"

    run = Vanishing(priority="advantage")
    run.generate(8, step=0)
    assert run.core.state.counters.reasons == {"filtered/VANISHED_ADVANTAGE": 4}
    assert run.core.state.replay.vanished == 0


def test_the_audit_rejects_a_replay_of_what_a_finalizer_dropped() -> None:
    run = Replaying(priority="compensation", share=1.0, capacity_groups=4)
    run.step(1)
    assert replayed(run.step(2))
    assert audit(run.records).holds
    last = 3  # the group whose samples wait
    report = audit(doctored(run, f.GroupFinalized, lambda x: replace(x, decision=f.GroupDecision.FILTER), last))
    assert "which was neither trained nor deferred" in report.to_text()


def test_groups_without_the_success_reward_are_not_filtered() -> None:
    class Unnamed(Replaying):
        def generate(self, num: int, **fields: Any) -> list[str]:
            self.core.state.spec = replace(self.core.state.the_spec, success_reward="misspelled")
            return super().generate(num, **fields)

    run = Unnamed(priority="advantage")
    assert len(run.batch(1).groups) == 4


def test_dropped_groups_that_the_log_replaces_admit_no_others_at_eta_0() -> None:
    class Vanishing(Replaying):
        def reward(self, episode: str) -> float:
            group = int(episode.split(".")[0].removeprefix("g"))
            return 1.0 if group >= 4 else float(episode.endswith(".0"))

    run = Vanishing(priority="advantage", share=0.75, max_staleness=UNLIMITED)
    run.core.state.spec = replace(run.core.state.the_spec, max_staleness=0, admit_early=True)
    run.step(1)
    waiting = run.ask(i.LeaseBatch, **NAMES, trainer_epoch=run.epoch, update=2, wait_s=9.0)
    run.generate(8, step=1)
    assert waiting is None
    assert run.core.state.replay.vanished == 4
    acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=16, wait_s=1.0)
    assert len(acquired.leases) == 2, "one group of two: the log has the places of the other three"


def test_the_log_is_not_ranked_before_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Replaying(priority="advantage")
    run.step(1)
    monkeypatch.setattr(replay_decisions, "_ranked", lambda *_: pytest.fail("the log was ranked"))
    assert len(run.lease(2).groups) == 4


def test_a_waiting_trainer_gets_the_number_that_it_waits_for() -> None:
    run = Replaying(priority="advantage", max_staleness=UNLIMITED)
    run.step(1)
    run.step(2)
    run.generate(6, step=2)
    lease = run.ask(i.LeaseBatch, **NAMES, trainer_epoch=run.epoch, update=3, wait_s=0.0)
    assert lease.waiting_for.startswith("READY groups: 3 of 4"), "no group has vanished, so the log replaces none"


def test_the_payloads_in_the_log_have_at_most_its_bytes() -> None:
    run = Replaying(capacity_bytes=60)
    run.step(1)
    run.step(2)
    log = run.core.state.replay
    assert list(log.entries) == ["g1", "g2", "g3"], "each has 20 bytes"
    assert (log.num_bytes, log.left) == (60, {"capacity": 1})


def test_the_log_keeps_of_a_task_what_batches_name() -> None:
    run = Replaying()
    group = run.batch(1).groups[0].group
    run.core.state.groups[group].task = f.Task(task_id="t0", labels={"level": "5"}, extras={"prefix": "x" * 1000})
    run.finish(1, run.lease(1))
    assert run.core.state.replay.entries[group].group.task == f.Task(task_id="t0", labels={"level": "5"})


def test_measures_without_an_advantage_leave_it_unknown() -> None:
    run = Replaying()
    lease = run.batch(1)
    groups = (
        f.TrainedGroup(group="g0", measures={"loss": 1.0}, num_tokens=4),
        f.TrainedGroup(group="g1", mean_abs_advantage=0.25, num_tokens=4),
    )
    run.ask(i.CommitUpdate, **NAMES, trainer_epoch=run.epoch, update=1, lease_ids=(lease.lease_id,), groups=groups)
    assert [run.core.state.groups[name].mean_abs_advantage for name in ("g0", "g1")] == [-1.0, 0.25]


def test_adjusted_rewards_count_for_the_failed_groups_of_a_task() -> None:
    class Adjusting(OneTask):
        def decide(self, group: str) -> i.GroupDecided:
            samples = self.core.state.groups[group].samples
            rewards = (f.Reward(name="correct", value=1.0, segment=-1, scorer="exact@1"),)
            adjusted = tuple(f.SampleRewards(sample_id=name, rewards=rewards) for name in samples)
            return i.GroupDecided(group=group, decision=f.GroupDecision.KEEP, adjusted=adjusted)

    run = Adjusting(priority="success_per_task")
    run.batch(1)
    assert run.core.state.replay.failed_groups == {}


# The audit ------------------------------------------------------------------------------------------------------------


def _sample(fact: f.SamplesReplayed, **values: Any) -> f.SamplesReplayed:
    return replace(fact, samples=(replace(fact.samples[0], **values), *fact.samples[1:]))


@pytest.mark.parametrize(
    ("change", "check", "what"),
    [
        (lambda x: _sample(x, steps=(f.StepSpan(step=0, num_tokens=3),)), "bound", "its original g0.0.0 has 4 of 0.0"),
        (lambda x: _sample(x, original_id="g9.0.0"), "once", "which was neither trained nor deferred"),
        (lambda x: replace(x, original_group="g1"), "once", "which was neither trained nor deferred"),
        (lambda x: _sample(x, sample_id="g0.0.0"), "once", "sample g0.0.0 is replayed, but this id exists"),
        (lambda x: replace(x, samples=x.samples[1:]), "once", "has sample r0.0, which no group of the lease has"),
        (lambda x: None, "once", "has sample r0.0, which no group of the lease has"),
    ],
)
def test_an_altered_replay_is_found(change: Any, check: str, what: str) -> None:
    run = Replaying()
    run.step(1)
    run.step(2)
    report = audit(doctored(run, f.SamplesReplayed, change))
    assert check in broken(report)
    assert what in report.to_text()


def test_the_audit_checks_the_replay_bound_at_the_lease_and_at_the_commit() -> None:
    run = Replaying(max_staleness=4, capacity_groups=100)
    for update in range(1, 5):
        run.step(update)
    report = audit(doctored(run, f.RunCreated, lambda x: replace(x, spec=_bounded(x.spec))))
    text = report.to_text()
    assert "bound" in broken(report)
    assert "of update 3 has replayed sample" in text
    assert "update 3 used replayed sample" in text
    assert "replay bound 1" in text


def _bounded(spec: Any) -> Any:
    assert spec.replay is not None
    return replace(spec, replay=replace(spec.replay, max_staleness=1))


def test_the_history_of_a_sample_names_its_replays() -> None:
    run = Replaying()
    run.step(1)
    run.step(2)
    original = [line.what for line in sample_history(run.records, "g0.0.0")]
    assert original[-1] == "replayed as r0.0 for update 2"
    assert [line.what for line in sample_history(run.records, "r0.0")] == [
        "replays g0.0.0 of group g0 for update 2: 4 tokens of step 0.0",
        "leased for update 2 in batch b1.2.0.1, trainer epoch 1",
        "used by update 2, incarnation 0",
        "trained: a checkpoint with update 2 is durable",
    ]
