"""Groups with plans: their size, the variants of their episodes, and what of it is in the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rollmesh.services.coordinator import translate
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.apply import apply
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.decision_context import DrawTasks
from rollmesh.services.coordinator.core.facts import (
    GroupDecision,
    GroupReserved,
    PayloadRef,
    Purpose,
    SampleMeta,
    SampleSummary,
    StepSpan,
    Task,
)
from rollmesh.services.coordinator.core.rollouts import LEASES_BYTES_MAX, SUBMITTED_BYTES_MAX
from rollmesh.services.coordinator.core.state import State
from rollmesh.services.coordinator.fact_codec import decode_record, encode_record
from rollmesh.services.coordinator.snapshots import encode_state
from rollmesh.shared.codec.plans import decode_variant, encode_plan
from rollmesh.shared.config.settings import SettingError
from rollmesh.shared.domain.plans import Plan, SamplingOverrides, Variant, variant_of, variants_bytes
from rollmesh.shared.errors import InvalidInput
from rollmesh.v1 import data_pb2, events_pb2, types_pb2

from .core_run import NAMES, CoreRun

PLAIN = Variant(name="plain", count=1)
HOT = Variant(name="hot", count=2, sampling=SamplingOverrides(temperature=1.3))
PAIR = (PLAIN, Variant(name="hot", sampling=SamplingOverrides(temperature=1.3)))


class Planned(CoreRun):
    """A run whose selector plans the draws in `plans`."""

    def __init__(self, plans: dict[int, Plan], **spec: Any) -> None:
        self.plans = plans
        super().__init__(**spec)
        self.begin()

    def plan(self, draw: int) -> Plan | None:
        return self.plans.get(draw)

    def acquire(self, num: int, **fields: Any) -> i.Acquired:
        acquired: i.Acquired = self.ask(i.AcquireRollouts, **({"node_id": "w", "num_max": num, "wait_s": 1.0} | fields))
        return acquired

    @property
    def reserved(self) -> list[GroupReserved]:
        return [fact for fact in self.facts if isinstance(fact, GroupReserved)]


class Extending(Planned):
    """Its finalizers once request `num_extend` more episodes for a group."""

    num_extend = 0

    def decide(self, group: str) -> i.GroupDecided:
        num, self.num_extend = self.num_extend, 0
        decision = GroupDecision.EXTEND if num else GroupDecision.KEEP
        return i.GroupDecided(group=group, decision=decision, num_extend=num)


def names(acquired: i.Acquired) -> list[str]:
    return [lease.variant.name if lease.variant is not None else "" for lease in acquired.leases]


def refold(run: CoreRun) -> State:
    """Return the fold of the stored records of a run, as a recovery reads them."""
    state = State()
    for record in run.records:
        for fact in decode_record(encode_record(record.record_id, 0.0, record.facts)).facts:
            apply(state, fact)
    return state


# Reservations ---------------------------------------------------------------------------------------------------------


def test_a_run_without_plans_writes_the_facts_that_it_always_wrote() -> None:
    run = Planned({})
    assert names(run.acquire(4)) == [""] * 4
    payload = encode_record("r", 0.0, run.reserved)
    written = [fact.group_reserved for fact in events_pb2.LedgerRecord.FromString(payload).facts]
    assert [one.num_episodes for one in written] == [2, 2]
    assert not {field.name for one in written for field, _ in one.ListFields()} & {"variants", "propensity", "together"}


def test_the_variants_of_the_run_are_the_default_plan_and_each_lease_has_its_own() -> None:
    run = Planned({}, group_size=3, variants=(PLAIN, HOT))
    leases = run.acquire(6).leases
    assert [lease.variant for lease in leases] == [PLAIN, HOT, HOT] * 2
    assert [lease.index for lease in leases] == [0, 1, 2] * 2
    assert [fact.variants for fact in run.reserved] == [(PLAIN, HOT)] * 2


def test_a_selector_plans_groups_of_different_size_with_their_variants_and_propensity() -> None:
    plans = {0: Plan(size=1), 1: Plan(variants=(PLAIN, HOT), propensity=0.25), 2: Plan(size=4, together="x")}
    run = Planned(plans, variants=PAIR, batch_groups=4)
    assert names(run.acquire(8)) == ["", "plain", "hot", "hot", "", "", "", ""]
    assert names(run.acquire(2)) == ["plain", "hot"]
    assert [fact.num_episodes for fact in run.reserved] == [1, 3, 4, 2]
    assert [fact.propensity for fact in run.reserved] == [0.0, 0.25, 0.0, 0.0]
    assert [fact.together for fact in run.reserved] == ["", "", "x", ""]


def test_groups_of_unequal_size_are_finalized_with_their_own_and_are_whole_in_a_batch() -> None:
    run = Planned({0: Plan(size=1), 1: Plan(variants=(PLAIN, HOT), propensity=0.5)})
    run.generate(4, step=0)
    batch = run.lease(1)
    assert {group.group: len(group.members) for group in batch.groups} == {"g0": 1, "g1": 3}
    assert [group.propensity for group in batch.groups] == [0.0, 0.5]
    assert [member.summary.variant for member in batch.groups[1].members] == ["plain", "hot", "hot"]
    run.commit(1, batch.lease_id)
    counters = run.core.state.counters
    assert counters.reserved == 4
    assert counters.conserved


@pytest.mark.parametrize(("amount", "groups"), [(1, 1), (2, 2), (4, 2), (5, 3)])
def test_a_batch_of_samples_takes_whole_groups_whatever_their_size(amount: int, groups: int) -> None:
    run = Planned({0: Plan(size=1), 1: Plan(size=3), 2: Plan(size=1), 3: Plan(size=1)})
    run.generate(5, step=0)
    unit = i.GeometryUnit.SAMPLES
    batch = run.ask(i.LeaseBatch, **NAMES, trainer_epoch=run.epoch, update=1, unit=unit, amount=amount)
    assert len(batch.groups) == groups
    assert len(batch.samples) == {1: 1, 2: 4, 3: 5}[groups]


def pairs(*names: str, **spec: Any) -> Planned:
    """Return a run whose draws have these names, with groups of one episode and batches of four groups."""
    plans = {draw: Plan(size=1, together=name) for draw, name in enumerate(names)}
    return Planned(plans, **({"batch_groups": 4, "group_size": 1} | spec))


def leased(run: Planned, update: int) -> list[str]:
    batch = run.lease(update)
    run.commit(update, batch.lease_id)
    return [group.group for group in batch.groups]


def test_groups_that_belong_together_are_leased_in_one_batch_if_others_fill_it() -> None:
    run = pairs("", "a", "b", "", "a", "c", "b", "c")
    run.generate(8, step=0)
    assert leased(run, 1) == ["g0", "g1", "g3", "g4"], "the pair b does not fit after g0 and the pair a"
    run.publish(1)
    assert leased(run, 2) == ["g2", "g5", "g6", "g7"]


def test_a_group_whose_partner_is_not_ready_waits_while_others_fill_the_batch() -> None:
    run = pairs("a", "", "", "", "", "a", "", "")
    run.generate(5, step=0)
    run.acquire(1)
    assert leased(run, 1) == ["g1", "g2", "g3", "g4"]


def test_a_group_does_not_wait_for_its_partner_until_it_is_stale() -> None:
    run = pairs("", "", "a", "a", "", "", batch_groups=2, max_staleness=1)
    run.generate(3, step=0)
    run.acquire(1)  # the partner of g2
    assert leased(run, 1) == ["g0", "g1"]
    run.publish(1)
    run.generate(2, step=1)
    assert leased(run, 2) == ["g2", "g4"], "g2 would be beyond the bound at update 3"


def test_a_batch_never_waits_for_a_partner() -> None:
    run = pairs("a", "", "", "", "a", max_staleness=1)
    run.generate(4, step=0)
    run.acquire(1)
    assert leased(run, 1) == ["g0", "g1", "g2", "g3"]
    odd = pairs("a", "a", "a", "b", "b", max_staleness=1)
    odd.generate(5, step=0)
    assert leased(odd, 1) == ["g0", "g1", "g2", "g3"], "a batch of four cannot be filled with whole bundles"


def test_an_extended_group_begins_again_with_its_first_variant() -> None:
    run = Extending({0: Plan(variants=(PLAIN, HOT))}, batch_groups=1)
    run.num_extend = 4
    run.generate(3, step=0)
    leases = [lease for lease in run.acquire(6).leases if lease.group == "g0"]
    assert names(i.Acquired(leases=tuple(leases))) == ["plain", "hot", "hot", "plain"]


@pytest.mark.parametrize(("num", "size"), [(9, 12), (10, 3)])
def test_a_group_grows_to_four_times_the_size_with_which_it_began(num: int, size: int) -> None:
    run = Extending({0: Plan(size=3)}, batch_groups=2)
    run.num_extend = num
    run.generate(3, step=0)
    assert len(run.core.state.groups["g0"].episodes) == size


# Recovery -------------------------------------------------------------------------------------------------------------


def test_a_recovered_run_leases_the_remaining_episodes_with_the_variants_that_were_recorded() -> None:
    run = Planned({0: Plan(variants=(PLAIN, HOT), propensity=0.5)}, batch_groups=2)
    run.generate(1, step=0)
    recovered = refold(run)
    assert encode_state(recovered) == encode_state(run.core.state)
    assert recovered.groups["g0"].propensity == 0.5
    run.core, run.plans = Core(recovered), {}
    assert names(run.acquire(2)) == ["hot", "hot"]


# Random draws ---------------------------------------------------------------------------------------------------------


def test_variants_with_the_same_seed_draw_the_same_numbers_pair_by_pair() -> None:
    paired = tuple(Variant(name=name, count=2, seed=7) for name in ("a", "b"))
    run = Planned({}, group_size=5, variants=(*paired, Variant(name="c")))
    seeds = [lease.seed for lease in run.acquire(10).leases]
    first, second = seeds[:5], seeds[5:]
    assert first[:2] == first[2:4]
    assert len(set(first)) == 3
    assert not set(first) & set(second), "another group draws other numbers"


def test_a_retry_keeps_variant_and_seed() -> None:
    run = Planned({}, group_size=3, variants=(PLAIN, HOT))
    (lease,) = run.acquire(1).leases
    failed = i.EpisodeReport(
        lease_id=lease.lease_id,
        group=lease.group,
        episode=lease.episode,
        attempt=1,
        outcome=m.EpisodeOutcome.INFRA_FAILURE,
    )
    run.ask(i.ReportEpisodes, node_id="w", reports=(failed,))
    (again,) = run.acquire(1).leases
    assert (again.episode, again.attempt) == (lease.episode, 2)
    assert (again.variant, again.seed) == (lease.variant, lease.seed)


def test_the_variants_of_episodes_follow_the_counts_in_order() -> None:
    found = [variant_of((PLAIN, HOT), index) for index in range(8)]
    assert [(one[0].name, one[1]) for one in found if one] == [
        ("plain", 0), ("hot", 0), ("hot", 1), ("plain", 1), ("hot", 2), ("hot", 3), ("plain", 2), ("hot", 4),
    ]  # fmt: skip
    assert variant_of((), 0) is None


# Sizes of records -----------------------------------------------------------------------------------------------------

LONG = tuple(Variant(name=f"v{number}", hint="x" * 15_000) for number in range(4))


def largest_record(run: CoreRun) -> int:
    return max(len(encode_record(record.record_id, 0.0, record.facts)) for record in run.records)


def test_long_variants_of_the_run_are_not_in_one_record_of_all_draws() -> None:
    run = Planned({}, group_size=4, batch_groups=64, variants=LONG)
    run.acquire(256)
    per_record = [sum(isinstance(fact, GroupReserved) for fact in record.facts) for record in run.records]
    assert max(per_record) == SUBMITTED_BYTES_MAX // variants_bytes(LONG)
    assert largest_record(run) < 2 * SUBMITTED_BYTES_MAX


def test_replayed_dead_letters_with_long_variants_are_reserved_over_several_records() -> None:
    run = Planned({}, group_size=4, batch_groups=64, variants=LONG)
    dead = tuple(i.DeadTask(dead_id=n + 1, task=Task(task_id=f"d{n}"), draw=n) for n in range(40))
    run.ask(i.ReplayDead, tasks=dead)
    run.acquire(200)
    assert largest_record(run) < 2 * SUBMITTED_BYTES_MAX
    assert 0 < len(run.core.state.replays) < 40
    while run.core.state.replays:
        run.acquire(200)
        run.take(run.core.handle(i.Tick(), run.now))
    assert [fact.task.task_id for fact in run.reserved][:40] == [f"d{n}" for n in range(40)], "before any draw"
    assert largest_record(run) < 2 * SUBMITTED_BYTES_MAX


def test_leases_with_long_variants_fit_into_the_reply() -> None:
    run = Planned({}, group_size=400, batch_groups=1, variants=(replace(LONG[0], count=400),))
    leases = run.acquire(400).leases
    assert 200 < len(leases) < 400
    assert sum(translate.episode_lease("r", lease).ByteSize() for lease in leases) <= LEASES_BYTES_MAX


# Bad input ------------------------------------------------------------------------------------------------------------


def test_a_report_with_another_variant_is_invalid_and_counts_as_an_attempt() -> None:
    run = Planned({}, group_size=3, variants=(PLAIN, HOT))
    (lease,) = run.acquire(1).leases
    meta = SampleMeta(
        sample_id=f"{lease.episode}.0",
        policy="main",
        steps=(StepSpan(step=0, num_tokens=4),),
        num_tokens=8,
        summary=SampleSummary(variant="hot"),
    )
    report = i.EpisodeReport(
        lease_id=lease.lease_id,
        group=lease.group,
        episode=lease.episode,
        attempt=1,
        outcome=m.EpisodeOutcome.COMPLETED,
        payload=PayloadRef(sequence=1, size_bytes=10),
        samples=(meta,),
    )
    (result,) = run.ask(i.ReportEpisodes, node_id="w", reports=(report,)).results
    what = "`summary.variant` must be that of the lease, 'plain', got 'hot'"
    assert result == f"INVALID_REPORT: sample {lease.episode}.0: {what}"
    assert run.core.state.groups[lease.group].episodes[lease.episode].failures == 1


def test_a_worker_of_the_release_before_gets_no_episode_with_a_variant_and_learns_why() -> None:
    run = Planned({0: Plan(variants=(PLAIN, HOT))})
    old = run.acquire(8, reads_variants=False)
    assert [lease.group for lease in old.leases][:2] == ["g1", "g1"]
    run.acquire(8, reads_variants=False)
    waiting = run.acquire(8, reads_variants=False, wait_s=0.0)
    assert not waiting.leases
    assert "a worker of protocol 1.0" in waiting.waiting_for
    assert names(run.acquire(8)) == ["plain", "hot", "hot"]


SPEC: dict[str, Any] = {"batch_groups": 2, "group_size": 4}
ONE = types_pb2.Variant(name="a", count=1)
NO_MASS = types_pb2.Variant(name="a", count=1, sampling=types_pb2.SamplingOverrides(top_p=0.0))


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (data_pb2.Plan(size=9), r"`size` must be <= 8, the episodes of a batch \(run.batch_groups \* run.group_size\)"),
        (data_pb2.Plan(size=-1), r"`size` must be in \[0, 16384\], got -1"),
        (data_pb2.Plan(propensity=1.5), r"`propensity` must be in \[0, 1\], got 1.5"),
        (data_pb2.Plan(size=3, variants=[ONE]), "`variants` must have counts that sum to the size of the group, 3"),
        (data_pb2.Plan(variants=[types_pb2.Variant(name="a")]), r"`variants\[0\].count` must be in \[1, 16384\]"),
        (data_pb2.Plan(variants=[types_pb2.Variant(count=1)]), r"`variants\[0\].name` must match"),
        (data_pb2.Plan(variants=[ONE, ONE]), r"`variants\[1\].name` must be different in each variant, got 'a' twice"),
        (data_pb2.Plan(variants=[NO_MASS]), r"`variants\[0\].sampling.top_p` must be in \(0, 1\], got 0"),
        (
            data_pb2.Plan(variants=[types_pb2.Variant(name="a", count=1, options={"n": "{"})]),
            r"`variants\[0\].options.n` is not JSON",
        ),
    ],
    ids=["batch", "negative", "propensity", "sum", "count", "name", "twice", "sampling", "options"],
)
def test_a_plan_that_does_not_fit_the_run_is_rejected_with_its_draw_and_field(plan: data_pb2.Plan, why: str) -> None:
    spec = CoreRun(**SPEC).core.state.the_spec
    drawn = data_pb2.DrawnTask(draw=5, task=types_pb2.Task(task_id="t5"), plan=plan)
    with pytest.raises(InvalidInput, match="the selector's plan for draw 5, task t5, does not fit the run: " + why):
        translate.tasks_drawn(spec, DrawTasks(Purpose.TRAIN, 5, 1), data_pb2.NextTasksResponse(tasks=[drawn]))


def test_all_batches_within_the_bound_fit_with_groups_of_the_planned_size() -> None:
    spec = CoreRun(batch_groups=256, group_size=100, max_staleness=4).core.state.the_spec
    drawn = data_pb2.DrawnTask(task=types_pb2.Task(task_id="t"), plan=data_pb2.Plan(size=103))
    with pytest.raises(InvalidInput, match=r"`size` must be <= 102, because .* = 1280 groups of it"):
        translate.tasks_drawn(spec, DrawTasks(Purpose.TRAIN, 0, 1), data_pb2.NextTasksResponse(tasks=[drawn]))


def test_a_plan_within_the_limits_is_taken_as_the_selector_made_it() -> None:
    spec = CoreRun(**SPEC).core.state.the_spec
    deep = Variant(name="b", count=7, options={"deep": [1, {"x": None}]}, seed=0, role="solver", hint_extra="solution")
    plan = Plan(variants=(PLAIN, deep), propensity=1.0, together="pair-7")
    drawn = [
        data_pb2.DrawnTask(draw=0, task=types_pb2.Task(task_id="t0"), plan=encode_plan(plan)),
        data_pb2.DrawnTask(draw=1, task=types_pb2.Task(task_id="t1")),
    ]
    found = translate.tasks_drawn(spec, DrawTasks(Purpose.TRAIN, 0, 2), data_pb2.NextTasksResponse(tasks=drawn))
    assert found.plans == {0: plan}
    assert decode_variant(encode_plan(plan).variants[1]) == deep


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"variants": (PLAIN, HOT)}, "`variants` must have counts that sum to the size of the group, 4, got 3"),
        ({"variants": (PLAIN, PLAIN), "group_size": 2}, r"`variants\[1\].name` must be different in each variant"),
        (
            {"variants": tuple(Variant(name=f"v{n}", hint="x" * 16_000) for n in range(5)), "group_size": 5},
            "`variants` must have at most 65536 bytes of JSON",
        ),
        (
            {"variants": (PLAIN, HOT), "group_size": 3, "export_groups": 1, "updates_max": 0},
            "`variants` must be empty in a run that exports",
        ),
        (
            {"variants": (Variant(name="a", prefix_extra="solution", count=4),), "submitted_tasks": True},
            r"`variants\[0\].prefix_extra` must be empty in a run whose tasks are submitted",
        ),
    ],
    ids=["sum", "name", "bytes", "export", "submitted"],
)
def test_the_variants_of_a_run_must_fit_its_groups(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        CoreRun(**(SPEC | changes))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"hint": "h", "hint_extra": "solution"}, "`hint` must be empty with hint_extra = solution"),
        ({"prefix": "h", "prefix_extra": "solution"}, "`prefix` must be empty with prefix_extra = solution"),
        ({"options": {"x": object()}}, r"`options.x` must be a JSON value"),
        ({"agent": "a b"}, "`agent` must match"),
    ],
    ids=["hint", "prefix", "options", "agent"],
)
def test_a_variant_with_fields_that_contradict_each_other_is_an_error(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(SettingError, match=why):
        Variant(name="a", **fields)


def test_sampling_out_of_range_names_its_field() -> None:
    with pytest.raises(SettingError, match=r"`temperature` must be in \[0, 10\], got 11"):
        SamplingOverrides(temperature=11.0)
