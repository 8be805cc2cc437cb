"""Admission on demand: what is withheld while the learner is busy, and that nothing is withheld for which it waits."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from rollmesh.services.coordinator.core import demand
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.core import Core
from rollmesh.services.coordinator.core.state import GroupPhase, State

from .core_run import NAMES, CoreRun

ETA, BATCH = 4, 2


def begun(**spec: Any) -> CoreRun:
    """Return a run after its first publication: batches of 2 groups of 2 episodes."""
    run = CoreRun(**({"max_staleness": ETA, "batch_groups": BATCH, "group_size": 2} | spec))
    run.begin()
    return run


def generate_all(run: CoreRun, *, step: int) -> int:
    """Let a fast worker generate until admission gives it nothing. Return the number of groups generated."""
    num, refused = 0, 0
    while refused < 2:  # the first request without a lease may have drawn a task for the next one
        ids = run.generate(2, step=step, wait_s=0.0)
        num, refused = num + len(ids), 0 if ids else refused + 1
    return num // 2


def update(run: CoreRun, number: int, *, busy_s: float = 1.0) -> None:
    """Lease, train for `busy_s`, commit and publish an update."""
    lease_id = run.lease(number).lease_id
    assert lease_id, f"update {number} has no batch"
    run.now += busy_s
    run.commit(number, lease_id)
    run.publish(number)


def why_no_work(run: CoreRun) -> str:
    refused: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=1, wait_s=0.0)
    return refused.waiting_for


def ready(run: CoreRun) -> int:
    return len(run.core.state.training_groups(GroupPhase.READY))


def test_a_busy_learner_gets_one_batch_ahead_and_the_worker_learns_why() -> None:
    run = begun()
    assert generate_all(run, step=0) == (ETA + 1) * BATCH, "before the first measurement the bound alone admits"
    admitted = []
    for number in range(1, ETA + 5):
        update(run, number)
        admitted.append(generate_all(run, step=number))
    assert admitted == [BATCH, 0, 0, 0, BATCH, BATCH, BATCH, BATCH], "first the groups beyond the demand are trained"
    waits = why_no_work(run)
    assert waits == "demand: 4 READY groups and 0 on their way are enough until the learner finishes an update"
    assert ready(run) == 2 * BATCH, "the batch that it may lease now, and the next one"
    lags = run.core.state.the_clock.trained_by_staleness
    assert lags == {0: 4, 1: 12, 2: 4, 3: 4, 4: 8}


def test_with_admit_early_the_bound_alone_admits() -> None:
    run = begun(admit_early=True)
    assert generate_all(run, step=0) == (ETA + 1) * BATCH
    for number in range(1, ETA + 4):
        update(run, number)
        assert generate_all(run, step=number) == BATCH
    assert why_no_work(run).startswith("admission: ")
    assert run.core.state.the_clock.trained_by_staleness[ETA] == 3 * BATCH * 2


def test_groups_that_take_longer_than_an_update_raise_the_allowance() -> None:
    run = begun()
    generate_all(run, step=0)
    for number in range(1, ETA + 3):
        update(run, number)
        generate_all(run, step=number)
    assert run.core.ephemeral.demand.ahead == BATCH
    run.now += 0.5
    assert generate_all(run, step=ETA + 2) == 0, "nothing is admitted while the learner is busy"
    lease_id = run.lease(ETA + 3).lease_id
    run.now += 1.0
    run.commit(ETA + 3, lease_id)
    run.publish(ETA + 3)
    taken: i.Acquired = run.ask(i.AcquireRollouts, node_id="slow", num_max=4, wait_s=1.0)
    assert len(taken.leases) == 4
    update(run, ETA + 4)
    run.lease(ETA + 5)
    assert run.core.ephemeral.demand.ahead == BATCH + len(taken.leases) // 2, "a batch, and the groups that are late"


def test_a_learner_that_waits_raises_the_allowance_and_the_debt_decays() -> None:
    run = begun()
    generate_all(run, step=0)
    for number in range(1, ETA + 3):
        update(run, number)
        generate_all(run, step=number)
    for number in range(ETA + 3, ETA + 5):
        update(run, number)  # two batches without a new group
    assert run.lease(ETA + 5).lease_id == "", "it polls, and waits between two polls"
    run.now += 0.25
    generate_all(run, step=ETA + 4)
    update(run, ETA + 5)
    state = run.core.ephemeral.demand
    assert 0.2 < state.debt_s <= 0.25
    assert state.ahead is not None
    assert state.ahead >= 2 * BATCH, "a quarter of an update's time raises it by two batches"
    run.now += 30.0
    run.core.handle(i.Tick(), run.now)
    assert state.debt_s == 0.0


def test_nothing_is_withheld_if_the_learner_waits_and_no_group_is_on_its_way() -> None:
    """A trainer whose batches are larger than `batch_groups` gets as many groups as the bound admits."""
    run = begun()
    generate_all(run, step=0)
    for number in range(1, ETA + 3):
        update(run, number)
        generate_all(run, step=number)
    large = {"trainer_epoch": run.epoch, "update": ETA + 3, "unit": i.GeometryUnit.SAMPLES, "amount": 16, **NAMES}
    assert run.ask(i.LeaseBatch, **large).lease_id == ""
    assert generate_all(run, step=ETA + 2) + ready(run) >= 8
    assert len(run.ask(i.LeaseBatch, **large).samples) == 16


def test_a_recovered_coordinator_begins_with_the_groups_that_are_live() -> None:
    run = begun()
    generate_all(run, step=0)
    for number in range(1, ETA + 3):
        update(run, number)
        generate_all(run, step=number)
    live = ready(run)
    stored = msgspec.msgpack.encode(run.core.state)
    run.core = Core(msgspec.msgpack.decode(stored, type=State))
    run.take(run.core.resume(run.now))
    assert generate_all(run, step=ETA + 2) == 0
    assert ready(run) == live
    update(run, ETA + 3)
    assert generate_all(run, step=ETA + 3) == BATCH


def test_a_new_trainer_and_a_roll_back_do_not_count_as_a_wait() -> None:
    run = begun()
    generate_all(run, step=0)
    update(run, 1)
    digest = run.core.state.the_clock.digest
    update(run, 2)
    assert run.lease(3).lease_id
    run.now += 100.0
    run.attach(1, digest)
    assert run.core.ephemeral.demand.debt_s == 0.0
    run.publish(1, incarnation=1)
    run.now += 50.0
    update_id = run.lease(2).lease_id
    assert update_id
    assert run.core.ephemeral.demand.debt_s == 0.0


def test_a_change_of_the_setting_takes_effect_at_once() -> None:
    run = begun()
    generate_all(run, step=0)
    for number in range(1, ETA + 3):
        update(run, number)
        generate_all(run, step=number)
    assert demand.ahead_groups(run.core.state, run.core.ephemeral.demand)["demand"] == BATCH
    spec = msgspec.structs.replace(run.core.state.the_spec, admit_early=True)
    run.ask(m.ChangeRun, spec=spec, changes=(), change_id="c1")
    assert generate_all(run, step=ETA + 2) == (ETA - 1) * BATCH
    assert demand.ahead_groups(run.core.state, run.core.ephemeral.demand) == {
        "admitted": ETA * BATCH,
        "demand": ETA * BATCH,
        "bound": ETA * BATCH,
    }


def test_an_update_that_took_no_time_leaves_the_bound_alone() -> None:
    """With a debt and an update of 0 s the slack would be infinite."""
    run = begun()
    generate_all(run, step=0)
    measured = demand.LearnerDemand(needs=deque([BATCH]), debt_s=0.1, update_s=0.0)
    demand.observe(run.core.state, measured, run.now, unserved=False)
    assert measured.debt_s == 0.1
    assert measured.ahead is None
