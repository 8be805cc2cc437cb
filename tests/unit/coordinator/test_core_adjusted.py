"""Rewards that a finalizer adjusts are in the lease, for the samples and for their group."""

from __future__ import annotations

from dataclasses import replace

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.core import Decision
from rollmesh.services.coordinator.core.facts import Reward, SampleRewards

from .core_run import CoreRun


class _Adjusting(CoreRun):
    """Give the first sample of each group a reward of 7."""

    def take(self, decision: Decision) -> dict[int, object]:
        core, handle = self.core, self.core.handle

        def adjusted(given: object, now: float) -> Decision:
            if isinstance(given, i.GroupDecided):
                reward = Reward(name="correct", value=7.0, segment=-1, scorer="exact@1")
                given = replace(given, adjusted=(SampleRewards(sample_id=f"{given.group}.0.0", rewards=(reward,)),))
            return handle(given, now)  # type: ignore[arg-type]

        core.handle = adjusted  # type: ignore[method-assign, assignment]
        try:
            return super().take(decision)
        finally:
            core.handle = handle  # type: ignore[method-assign]


def test_adjusted_rewards_reach_the_batch_and_its_group_contexts() -> None:
    run = _Adjusting()
    run.begin()
    made = run.generate(4, step=0)
    batch = run.lease(1)
    leased = {s.meta.sample_id: s.meta.rewards[0].value for s in batch.samples}
    members = {m.sample_id: m.rewards[0].value for group in batch.groups for m in group.members}
    assert {s.meta.sample_id: s.rewards_as_reported for s in batch.samples} == {s: not s.endswith(".0.0") for s in made}
    assert leased == members == {sample: 7.0 if sample.endswith(".0.0") else 1.0 for sample in made}
    assert {m.sample_id: m.episode for group in batch.groups for m in group.members} == {s: s[:-2] for s in made}
