"""The finalizer that keeps a band of success rates: decisions by hand, and batches of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rollmesh.services.coordinator.core import inputs as i
from rollmesh.services.coordinator.core.facts import GroupDecision
from rollmesh.services.coordinator.metrics import DROPPED
from rollmesh.services.coordinator.readings import _run
from rollmesh.services.reward.finalizer import FINALIZERS, FinalizerDecision, Group, Verdict
from rollmesh.services.reward.item import TaskView
from rollmesh.shared.config.registry import Extension
from rollmesh.shared.domain.ledger_head import LedgerHead
from rollmesh.shared.domain.trajectory import GroupContext, MemberOutcome, Outcome, Reward, SampleSummary
from rollmesh.shared.errors import ConfigError
from rollmesh.trainer.estimators import make_estimator

from ..coordinator.core_run import CoreRun

KEEP, FILTER = FinalizerDecision.KEEP, FinalizerDecision.FILTER


def member(sample_id: str, value: float, *, outcome: Outcome = Outcome.OK, episode: str = "") -> MemberOutcome:
    reward = Reward(name="correct", value=value, outcome=outcome)
    return MemberOutcome(sample_id=sample_id, rewards=(reward,), end="ready", episode=episode)


def decide(*members: MemberOutcome, **options: Any) -> Verdict:
    advantages = make_estimator("grpo").of_group(GroupContext(group="g", task="t", members=members))
    group = Group(group="g", task=TaskView(task_id="t"), members=members, advantages=advantages)
    verdict: Verdict = FINALIZERS.make(Extension("band", options)).decide(group)
    return verdict


@pytest.mark.parametrize(
    ("values", "decision", "reason"),
    [
        ((0, 0, 0, 0, 1), KEEP, ""),  # 0.2 and 0.8 are in the band
        ((1, 1, 1, 1, 0), KEEP, ""),
        ((0, 0, 0, 0, 0, 1), FILTER, "TOO_HARD"),
        ((1, 1, 1, 1, 1, 0), FILTER, "TOO_EASY"),
        ((0, 0), FILTER, "TOO_HARD"),
        ((1, 1), FILTER, "TOO_EASY"),
        ((0.25, 0.5), KEEP, ""),
        ((1,), FILTER, "TOO_FEW_SURVIVORS"),
        ((), FILTER, "TOO_FEW_SURVIVORS"),
    ],
)
def test_a_group_is_kept_if_its_rate_is_in_the_band(
    values: tuple[float, ...], decision: FinalizerDecision, reason: str
) -> None:
    verdict = decide(*(member(str(n), value) for n, value in enumerate(values)))
    assert (verdict.decision, verdict.reason) == (decision, reason)


def test_failures_greedy_samples_and_other_rewards_do_not_count() -> None:
    members = [member("0", 1.0), member("1", 1.0), member("2", 0.0, outcome=Outcome.INFRA_FAILURE)]
    assert decide(*members).reason == "TOO_EASY"
    greedy = replace(member("3", 0.0), summary=SampleSummary(greedy=True))
    assert decide(*members, greedy).reason == "TOO_EASY"
    other = MemberOutcome(sample_id="4", rewards=(Reward(name="short", value=0.0),), end="ready")
    turn = replace(members[0], rewards=(*members[0].rewards, Reward(name="correct", value=0.0, segment=3)))
    assert decide(turn, members[1], other).reason == "TOO_EASY"
    assert decide(*members, other, reward="short", survivors_min=1).reason == "TOO_HARD"
    assert decide(*members, member("5", 0.0)).decision is KEEP


def test_samples_of_one_episode_count_once() -> None:
    members = [member("0", 1.0, episode="e0"), member("1", 1.0, episode="e0"), member("2", 1.0, episode="e0")]
    assert decide(*members).reason == "TOO_FEW_SURVIVORS"
    assert decide(*members, member("3", 0.0, episode="e1"), high=0.5).decision is KEEP


def test_the_band_must_be_in_order() -> None:
    with pytest.raises(ConfigError, match="`low` must be <= high = 0.2, got 0.8"):
        decide(low=0.8, high=0.2)
    with pytest.raises(ConfigError, match="high.*1.5"):
        decide(high=1.5)


class BandRun(CoreRun):
    """A run whose tasks have success rates from 0 to 1, and whose groups the finalizer decides."""

    def __init__(self, **spec: Any) -> None:
        self.rng = np.random.default_rng(0)
        self.values: dict[str, float] = {}
        self.decided: list[str] = []
        super().__init__(**spec)

    def reward(self, episode: str) -> float:
        group = episode.rpartition(".")[0]
        rate = sum(map(ord, group)) % 11 / 10
        self.values[episode] = float(self.rng.random() < rate)
        return self.values[episode]

    def decide(self, group: str) -> i.GroupDecided:
        members = [member(name, value) for name, value in self.values.items() if name.startswith(f"{group}.")]
        verdict = decide(*members, low=0.25, high=0.75)
        self.decided.append(verdict.reason)
        return i.GroupDecided(group=group, decision=GroupDecision[verdict.decision.name], reason=verdict.reason)


@pytest.mark.row("S064")
def test_every_batch_is_full_of_groups_in_the_band_and_rejections_are_counted() -> None:
    batch_groups, size, updates = 3, 8, 12
    run = BandRun(batch_groups=batch_groups, group_size=size)
    run.begin()
    for update in range(1, updates + 1):
        while run.decided.count("") < update * batch_groups:
            run.generate(size, step=update - 1)
        batch = run.lease(update)
        rates = [np.mean([m.rewards[0].value for m in group.members]) for group in batch.groups]
        assert (len(rates), len(batch.samples)) == (batch_groups, batch_groups * size)
        assert all(0.25 <= rate <= 0.75 for rate in rates)
        run.commit(update, batch.lease_id)
        run.publish(update)
    rejected = {reason: run.decided.count(reason) for reason in ("TOO_HARD", "TOO_EASY")}
    assert min(rejected.values()) > 0
    readings = _run("r", run.core, LedgerHead(), run.now)
    counted = {reading.labels[1]: reading.value for reading in readings if reading.metric is DROPPED}
    assert counted == {f"filtered/{reason}": num * size for reason, num in rejected.items()}
