"""Check bound, once and conservation with random histories: crashes, lost replies, expiries, roll-backs, late
reports."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.facts import GroupDecision
from rollmesh.services.coordinator.core.records import BoundPolicy
from rollmesh.shared.errors import MeshError
from tests.sim.world import World, endless_spec

OUTCOMES = st.sampled_from(
    [m.EpisodeOutcome.COMPLETED] * 6 + [m.EpisodeOutcome.INFRA_FAILURE, m.EpisodeOutcome.CANCELLED]
)
DECISIONS = st.sampled_from([GroupDecision.KEEP] * 4 + [GroupDecision.FILTER, GroupDecision.EXTEND])
EXPECTED_AFTER_DOUBT = {"LEASE_EXPIRED", "UNKNOWN_LEASE", "WRONG_UPDATE", "RUN_ENDED", "FENCED"}


class CoreMachine(RuleBasedStateMachine):
    """One run under faults. `World.check` holds after every step. `teardown` stops the faults and checks that the run
    completes."""

    world: World

    @initialize(eta=st.integers(0, 3), batch=st.integers(1, 3), size=st.integers(1, 3), seed=st.integers(0, 2**32))
    def begin(self, eta: int, batch: int, size: int, seed: int) -> None:
        spec = endless_spec(
            max_staleness=eta,
            beyond=BoundPolicy.DROP,
            batch_groups=batch,
            group_size=size,
            eval_every=2,
            eval_tasks=2,
            episode_lease_s=10.0,
            batch_lease_s=20.0,
            group_s_max=60.0,
            eval_s_max=30.0,
        )
        self.world = World(spec=spec, rng=random.Random(seed))
        self.world.ask(m.CreateRun(ticket=0, spec=spec))
        self.world.attach()
        self.world.checkpoint(report=True)

    def tolerate(self, action: Any, *args: Any, **kwargs: Any) -> None:
        """A trainer that has lost its lease is rejected and returns to its checkpoint."""
        try:
            action(*args, **kwargs)
        except MeshError as refusal:
            assert refusal.reason in EXPECTED_AFTER_DOUBT, refusal
            self.world.attach()

    @rule(num=st.integers(1, 8))
    def worker_acquires(self, num: int) -> None:
        self.world.acquire(num)

    @rule(outcome=OUTCOMES, again=st.booleans(), num=st.integers(0, 2))
    def worker_reports(self, outcome: m.EpisodeOutcome, again: bool, num: int) -> None:
        self.world.finish_episode(outcome=outcome, keep_lease=again, num_samples=num)

    @rule(count=st.integers(1, 12))
    def workers_complete(self, count: int) -> None:
        for _ in range(count):
            self.world.finish_episode(outcome=m.EpisodeOutcome.COMPLETED)

    @rule(decision=DECISIONS, drop_every=st.integers(0, 3))
    def services_answer(self, decision: GroupDecision, drop_every: int) -> None:
        self.world.serve_questions(decision, drop_every)

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0, 25.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def workers_renew(self) -> None:
        ids = tuple(lease.lease_id for lease in self.world.leases)
        self.world.ask(m.RenewLeases(ticket=self.world.ticket(), node_id="worker", lease_ids=ids))

    @rule()
    def trainer_leases(self) -> None:
        self.tolerate(self.world.lease_batch)

    @rule()
    def trainer_reads_ahead(self) -> None:
        self.world.read_ahead()

    @rule(updates=st.integers(1, 4), stragglers=st.integers(0, 5))
    def run_goes_on(self, updates: int, stragglers: int) -> None:
        for _ in range(updates):
            self.tolerate(self.world.train, stragglers=stragglers)

    @rule()
    def trainer_releases(self) -> None:
        self.tolerate(self.world.release_and_repeat)

    def some_leased(self, dropping: bool) -> list[str]:
        lease = self.world.trainer.lease
        return [s.meta.sample_id for s in lease.samples[:1]] if dropping and lease is not None else []

    @rule(dropping=st.booleans(), applied=st.booleans())
    def trainer_saves_and_dies_before_the_commit(self, dropping: bool, applied: bool) -> None:
        world = self.world
        if world.trainer.stepped or not self.is_held():
            return
        world.save_before_commit(dropped=self.some_leased(dropping), applied=applied)

    def is_held(self) -> bool:
        """Return whether the ledger still has the trainer's batch, held or in doubt."""
        lease = self.world.trainer.lease
        return lease is not None and lease.lease_id in self.world.core.state.batches

    @rule(lose_reply=st.booleans(), applied=st.sampled_from([True, True, True, False]), dropping=st.booleans())
    def trainer_commits(self, lose_reply: bool, applied: bool, dropping: bool) -> None:
        world = self.world
        before = world.trainer.lease
        dropped = self.some_leased(dropping)
        self.tolerate(world.step_and_commit, lose_reply=lose_reply, applied=applied, dropped=dropped)
        if before is not None and world.trainer.stepped:
            world.attach()  # it crashed before the reply: its checkpoint is older than the ledger

    @precondition(lambda self: not self.world.trainer.stepped)
    @rule()
    def trainer_publishes(self) -> None:
        self.tolerate(self.world.publish)

    @rule(report=st.booleans())
    def trainer_checkpoints(self, report: bool) -> None:
        self.tolerate(self.world.checkpoint, report=report)

    @rule()
    def trainer_dies(self) -> None:
        self.world.attach()

    @precondition(lambda self: len(self.world.checkpoints) > 1)
    @rule()
    def checkpoint_is_lost(self) -> None:
        self.world.lose_newest_checkpoint()
        self.world.attach()

    @rule()
    def coordinator_dies(self) -> None:
        self.world.crash_coordinator()

    @rule()
    def coordinator_restores(self) -> None:
        self.world.restore_from_snapshot()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        """Stop the faults: the run still trains, and after a stop only applied samples are live."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.attach()
        goal = world.trainer.update + 3
        for _ in range(400):
            if world.trainer.update >= goal:
                break
            world.acquire(8)
            while world.leases:
                world.finish_episode(outcome=m.EpisodeOutcome.COMPLETED)
            world.serve_questions()
            world.lease_batch()
            if world.trainer.lease is not None:
                world.step_and_commit(lose_reply=False)
                world.publish()
            world.advance(1.0)
            world.check()
        assert world.trainer.update >= goal, f"no progress: {world.core.waiting()}, {world.core.state.counters}"
        world.checkpoint(report=True)
        world.ask(m.StopRun(ticket=world.ticket(), reason="test"))
        world.check()
        assert world.core.state.counters.live == 0, world.core.state.groups


CoreMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_core_keeps_bound_once_and_conservation_under_faults = CoreMachine.TestCase
