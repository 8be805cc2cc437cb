"""Trainers attach: each resolution of what the last trainer left, and each rejection of a trainer."""

from __future__ import annotations

import random

import pytest

from rollmesh.services.coordinator.audit import audit_run
from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.decision_context import DrawTasks
from rollmesh.services.coordinator.core.facts import Purpose, SampleEnd
from rollmesh.services.coordinator.core.fleet import Fleet, NodeKind, choose
from rollmesh.services.coordinator.core.state import GroupPhase
from rollmesh.shared.domain.digest import next_digest
from tests.sim.world import NAMES, Checkpoint, World, endless_spec, refused
from tests.tamper.ledger_copy import made, store

from .core_run import CoreRun


def make_world(*, eta: int = 1, updates_max: int = 0, eval_every: int = 0, batch_lease_s: float = 20.0) -> World:
    spec = endless_spec(
        max_staleness=eta,
        batch_groups=2,
        group_size=2,
        updates_max=updates_max,
        eval_every=eval_every,
        eval_tasks=2,
        episode_lease_s=10.0,
        batch_lease_s=batch_lease_s,
    )
    world = World(spec=spec, rng=random.Random(0))
    world.ask(m.CreateRun(ticket=0, spec=spec))
    world.attach()
    world.checkpoint(report=True)
    return world


def attach_request(world: World, update: int, digest: str, *, forgetful: bool = False) -> i.AttachTrainer:
    return i.AttachTrainer(
        ticket=world.ticket(), last_update=update, digest=digest, keeps_no_checkpoints=forgetful, **NAMES
    )


def trained(world: World, updates: int) -> World:
    for _ in range(updates):
        world.train()
        world.checkpoint(report=True)
    return world


def test_attach_at_the_ledgers_end_continues() -> None:
    world = trained(make_world(), 2)
    answer = world.ask(attach_request(world, 2, world.trainer.digest))
    assert answer == i.Attached(trainer_epoch=2, next_update=3, incarnation=0, resolution=m.AttachResolution.CONTINUED)


def test_attach_behind_the_ledger_rolls_back_and_requires_publication() -> None:
    world = trained(make_world(), 1)
    first = world.checkpoints[-1]
    world.train()
    answer = world.ask(attach_request(world, 1, first.digest))
    assert isinstance(answer, i.Attached)
    assert (answer.next_update, answer.incarnation, answer.resolution) == (2, 1, m.AttachResolution.ROLLED_BACK)
    lease = i.LeaseBatch(ticket=9, trainer_epoch=answer.trainer_epoch, update=2, **NAMES)
    assert refused(world, lease) == "NOT_PUBLISHED"


def test_rolled_back_samples_in_bound_are_ready_again() -> None:
    world = make_world()
    world.train()
    assert len(world.core.state.training_groups(GroupPhase.APPLIED)) == 2
    world.ask(attach_request(world, 0, ""))
    assert len(world.core.state.training_groups(GroupPhase.READY)) >= 2
    assert world.core.state.counters.conserved


def test_samples_of_a_lost_checkpoint_are_no_longer_counted_as_trained() -> None:
    world = trained(make_world(), 2)
    before = world.core.state.counters.ends[SampleEnd.TRAINED]
    world.ask(attach_request(world, 0, ""))
    counters = world.core.state.counters
    assert (before, counters.ends[SampleEnd.TRAINED]) == (8, 0)
    assert counters.reasons["stale/ROLLED_BACK"] == 8
    assert counters.conserved


def test_checkpoint_that_holds_the_doubtful_update_rolls_forward() -> None:
    world = leased(trained(make_world(), 1))
    assert world.trainer.lease is not None
    used = [s.meta.sample_id for s in world.trainer.lease.samples]
    world.advance(25.0)  # the lease expires: in doubt
    assert len(world.core.state.training_groups(GroupPhase.IN_DOUBT)) == 2
    answer = world.ask(attach_request(world, 2, next_digest(world.trainer.digest, 2, used)))
    assert isinstance(answer, i.Attached)
    assert (answer.next_update, answer.resolution) == (3, m.AttachResolution.ROLLED_FORWARD)
    assert world.core.state.the_clock.checkpoint == 2


def generate(world: World) -> None:
    """Let workers finish all pending work."""
    world.acquire(8)
    world.serve_questions()
    while world.leases:
        world.finish_episode(outcome=m.EpisodeOutcome.COMPLETED)
    world.serve_questions()
    world.advance(0.1)


def leased(world: World) -> World:
    """Lease the batch of the trainer's next update."""
    for _ in range(10):
        generate(world)
        if world.trainer.lease is None:
            world.lease_batch()
    assert world.trainer.lease is not None
    return world


def test_batch_that_is_not_in_the_checkpoint_is_ready_again() -> None:
    world = leased(make_world())
    held = {g.group for g in world.core.state.training_groups(GroupPhase.LEASED)}
    world.ask(attach_request(world, 0, ""))
    assert len(held) == 2
    assert held <= {g.group for g in world.core.state.training_groups(GroupPhase.READY)}
    assert not world.core.state.batches


def test_trainer_that_cannot_say_loses_the_doubtful_samples() -> None:
    world = make_world()
    world.ask(attach_request(world, 0, "", forgetful=True))
    world.trainer.epoch = world.core.state.the_clock.trainer_epoch
    leased(world)
    world.ask(attach_request(world, 0, "", forgetful=True))
    assert world.core.state.counters.reasons["failed/IN_DOUBT"] == 4


@pytest.mark.parametrize(
    ("update", "digest", "reason"),
    [
        (2, "0" * 64, "DIGEST_MISMATCH"),
        (9, "0" * 64, "UNKNOWN_UPDATE"),
        (-1, "", "UNKNOWN_UPDATE"),
        (0, "x", "DIGEST_MISMATCH"),
    ],
)
def test_checkpoint_of_another_history_is_refused(update: int, digest: str, reason: str) -> None:
    world = trained(make_world(), 2)
    before = world.core.state.the_clock.trainer_epoch
    assert refused(world, attach_request(world, update, digest)) == reason
    assert world.core.state.the_clock.trainer_epoch == before


def test_older_epoch_is_fenced_from_every_verb() -> None:
    world = leased(make_world())
    lease = world.trainer.lease
    assert lease is not None
    world.ask(attach_request(world, 0, ""))
    old = {"ticket": 9, "trainer_epoch": 1, **NAMES}
    for request in (
        i.LeaseBatch(update=1, **old),
        m.RenewBatch(lease_id=lease.lease_id, **old),
        i.CommitUpdate(update=1, lease_ids=(lease.lease_id,), **old),
        m.ReleaseBatch(lease_id=lease.lease_id, **old),
        m.ReportCheckpoint(update=0, digest="", **old),
    ):
        assert refused(world, request) == "FENCED"


def test_commit_after_the_lease_expired_is_refused_until_an_attach() -> None:
    world = leased(make_world())
    lease = world.trainer.lease
    assert lease is not None
    world.advance(25.0)
    commit = i.CommitUpdate(ticket=9, trainer_epoch=1, update=1, lease_ids=(lease.lease_id,), **NAMES)
    assert refused(world, commit) == "LEASE_EXPIRED"
    assert refused(world, i.LeaseBatch(ticket=9, trainer_epoch=1, update=1, **NAMES)) == "LEASE_EXPIRED"


def test_run_ends_after_its_last_update_is_safe_and_measured() -> None:
    world = make_world(updates_max=2, eval_every=1)
    for _ in range(2):
        while world.core.pinned():
            generate(world)
        world.train()
    world.checkpoint(report=True)
    assert world.core.state.ended == "", "the last step is not measured yet"
    for _ in range(5):
        generate(world)
    assert world.core.state.ended == "UPDATES_MAX"
    assert [e.step for e in world.core.state.evals] == [0, 1, 2]
    assert world.core.state.counters.live == world.core.state.eval_counters.live == 0


def test_admission_stops_at_eta_plus_one_batches() -> None:
    world = make_world(eta=2)
    for _ in range(10):
        world.acquire(8)
    groups = world.core.state.training_groups(*GroupPhase)
    assert [g.update_intended for g in groups] == [1, 1, 2, 2, 3, 3]
    assert [g.step_min for g in groups] == [0, 0, 0, 0, 0, 0]


def test_checkpoint_dataclass_is_what_a_trainer_says() -> None:
    world = trained(make_world(), 1)
    assert world.checkpoints[-1] == Checkpoint(1, world.core.state.the_clock.digest, 0, world.trainer.content)


def test_episodes_that_wait_for_undone_weights_are_called_back_and_leased_within_reach() -> None:
    run = CoreRun(max_staleness=0, batch_groups=1, group_size=2)
    run.begin()
    for update in (1, 2):
        digest = run.commit(update, lease_of_one(run, update))
        run.publish(update)
    waiting: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=2, wait_s=1.0)
    assert {lease.step_min for lease in waiting.leases} == {2}
    assert digest
    attached = run.attach(last_update=0)
    assert attached.resolution is m.AttachResolution.ROLLED_BACK
    run.publish(0, incarnation=1)
    again: i.Acquired = run.ask(i.AcquireRollouts, node_id="w", num_max=2, wait_s=1.0)
    assert {lease.episode for lease in again.leases} == {lease.episode for lease in waiting.leases}
    assert {(lease.step_min, lease.incarnation_min) for lease in again.leases} == {(0, 1)}
    assert {lease.attempt for lease in again.leases} == {2}
    assert all(episode.failures == 0 for group in run.core.state.groups.values() for episode in group.episodes.values())


def lease_of_one(run: CoreRun, update: int) -> str:
    """Lease a batch of one group from the newest weights."""
    run.generate(2, step=update - 1)
    return run.lease(update).lease_id


def two_updates_then_an_evaluation() -> tuple[CoreRun, str]:
    """Return a run whose second update is published and waits for its evaluation, and the digest of its first
    update."""
    run = CoreRun(max_staleness=1, batch_groups=1, group_size=2, eval_every=2, eval_tasks=2)
    run.begin()
    run.generate(2, step=0)  # the evaluation of step 0
    first = run.commit(1, lease_of_one(run, 1))
    run.publish(1)
    run.commit(2, lease_of_one(run, 2))
    run.publish(2)
    assert run.core.pinned() == [(2, 0)]
    return run, first


@pytest.mark.parametrize("leased", [True, False])
async def test_a_roll_back_cancels_open_evaluations_and_nodes_take_the_new_weights_at_once(leased: bool) -> None:
    run, first = two_updates_then_an_evaluation()
    if leased:
        run.ask(i.AcquireRollouts, node_id="w", num_max=1, wait_s=1.0)
    assert run.attach(last_update=1, digest=first).resolution is m.AttachResolution.ROLLED_BACK
    run.publish(1, incarnation=1)
    state = run.core.state
    assert run.core.pinned() == [] == state.open_evals()
    fleet = Fleet()
    fleet.joined(
        node_id="n", kind=NodeKind.INFERENCE, address="", capacity=1, runs=(), active=state.the_clock.versions[-2], now=0.0
    )  # fmt: skip
    assert choose(fleet.nodes["n"], run.core.weight_goal()) == (state.the_clock.published, ())
    assert state.eval_counters.conserved
    assert (state.eval_counters.live, state.eval_counters.reasons["cancelled/ROLLED_BACK"]) == (0, 2)
    report = await audit_run(await store(made(record.facts for record in run.records)), "r")
    assert report.holds, report.to_text()


def test_after_a_roll_back_to_an_evaluated_step_its_new_weights_are_evaluated() -> None:
    run, _ = two_updates_then_an_evaluation()
    second = run.core.state.the_clock.digest
    run.ask(i.AcquireRollouts, node_id="w", num_max=2, wait_s=1.0)  # a worker holds the evaluation
    run.commit(3, lease_of_one(run, 3))
    assert run.attach(last_update=2, digest=second).resolution is m.AttachResolution.ROLLED_BACK
    run.publish(2, incarnation=1)
    assert run.core.pinned() == [(2, 1)]


def test_tasks_of_an_evaluation_that_a_roll_back_cancelled_are_not_reserved() -> None:
    world = trained(make_world(eval_every=1), 1)
    first = world.checkpoints[-1]
    world.train()
    late = [e for e in world.effects if isinstance(e, DrawTasks) and e.purpose is Purpose.EVAL]
    assert late
    world.ask(attach_request(world, 1, first.digest))
    world.serve_questions()
    assert world.core.pinned() == [] == world.core.state.open_evals()
