"""Check conservation in runs without a learner: crashes, expiries, failures, late and repeated reports, several
samples."""

from __future__ import annotations

import random

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rollmesh.services.coordinator.audit import Audit
from rollmesh.services.coordinator.core import messages as m
from rollmesh.services.coordinator.core.facts import SampleEnd
from rollmesh.services.coordinator.ledger import StoredRecord
from tests.sim.world import World, endless_spec

OUTCOMES = st.sampled_from(
    [m.EpisodeOutcome.COMPLETED] * 4 + [m.EpisodeOutcome.INFRA_FAILURE, m.EpisodeOutcome.CANCELLED]
)


class ExportMachine(RuleBasedStateMachine):
    """One run. `teardown` stops the faults. The run then ends, and every sample is exported or counted."""

    world: World

    @initialize(groups=st.integers(1, 6), size=st.integers(1, 3), tries=st.integers(1, 3), seed=st.integers(0, 2**32))
    def begin(self, groups: int, size: int, tries: int, seed: int) -> None:
        spec = endless_spec(
            export_groups=groups, group_size=size, tries_max=tries, episode_lease_s=10.0, group_s_max=60.0
        )
        self.world = World(spec=spec, rng=random.Random(seed))
        self.world.ask(m.CreateRun(ticket=0, spec=spec))
        self.world.attach()

    @rule(num=st.integers(1, 8))
    def worker_acquires(self, num: int) -> None:
        self.world.acquire(num)

    @rule(outcome=OUTCOMES, again=st.booleans(), num=st.integers(0, 2))
    def worker_reports(self, outcome: m.EpisodeOutcome, again: bool, num: int) -> None:
        self.world.finish_episode(outcome=outcome, keep_lease=again, num_samples=num)

    @rule(seconds=st.sampled_from([0.5, 11.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def services_answer(self) -> None:
        self.world.serve_questions()

    @rule()
    def the_trainer_with_the_weights_comes_again(self) -> None:
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
            scored = len(self.world.spans)
            assert self.world.core.state.counters.ends.get(SampleEnd.EXPORTED, 0) == scored

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world, state = self.world, self.world.core.state
        for _ in range(100):
            if world.core.state.ended:
                break
            world.acquire(8)
            while world.leases:
                world.finish_episode(outcome=m.EpisodeOutcome.COMPLETED)
            world.advance(1.0)
        state = world.core.state
        assert state.ended == "EXPORTED", world.core.waiting()
        assert (state.counters.live, state.num_groups) == (0, world.spec.export_groups)
        assert set(state.counters.ends) <= {
            SampleEnd.EXPORTED,
            SampleEnd.FAILED,
            SampleEnd.FILTERED,
            SampleEnd.CANCELLED,
        }
        audit = Audit()
        for position, facts in enumerate(world.ledger, start=1):
            audit.enter(StoredRecord(position=position, record_id="", time_unix_s=0.0, facts=facts))
        report = audit.report()
        assert report.holds, report.to_text()


ExportMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
test_core_conserves_samples_of_an_export_under_faults = ExportMachine.TestCase
